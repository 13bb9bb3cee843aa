"""What is said of a document that does not fit its type."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import pytest

from trunkline.engine.typed_bodies import convert
from trunkline.engine.validation import RequestError


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    size: int | None = None
    names: dict[str, str] | None = None


class Body(msgspec.Struct, forbid_unknown_fields=True):
    text: str
    flag: bool | None = None
    rows: list[dict[str, Any]] | None = None
    share: float | None = None
    inner: Inner | None = None
    kind: Literal["float", "base64"] | None = None


@pytest.mark.parametrize(
    ("document", "field", "message"),
    [
        ({}, "text", "text must be given."),
        ({"text": 5}, "text", "text must be a string, got 5."),
        ({"text": None}, "text", "text must be a string, got None."),
        ({"text": "", "flag": 1}, "flag", "flag must be true or false, got 1."),
        ({"text": "", "rows": {}}, "rows", "rows must be a list, got {}."),
        ({"text": "", "rows": [{}, 7]}, "rows[1]", "rows[1] must be an object, got 7."),
        ({"text": "", "share": "a"}, "share", "share must be a number, got 'a'."),
        (
            {"text": "", "inner": {"size": 1.5}},
            "inner.size",
            "inner.size must be an integer, got 1.5.",
        ),
        (
            {"text": "", "inner": {"names": {"a": 1}}},
            "inner.names[...]",
            "inner.names[...] must be a string, got an integer.",
        ),
        ({"text": "", "inner": {"zz": 1}}, "inner.zz", "inner.zz is no field of this body."),
        ({"text": "", "txet": 1}, "txet", "txet is no field of this body; did you mean text?"),
        ({"text": "", "kind": "hex"}, "kind", "kind must be one of float, base64, got 'hex'."),
        ({"text": "", "kind": 1}, "kind", "kind must be a string, got 1."),
        ([], None, "the body must be an object, got []."),
    ],
)
def test_errors_name_field_value_and_what_it_must_be(
    document: Any, field: str | None, message: str
) -> None:
    with pytest.raises(RequestError) as caught:
        convert(document, Body)
    assert (caught.value.message, caught.value.param) == (message, field)


def test_what_fits_is_taken() -> None:
    document = {"text": "a", "inner": {"size": 1}, "kind": "base64"}
    assert convert(document, Body) == Body(text="a", inner=Inner(size=1), kind="base64")
