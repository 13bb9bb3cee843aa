"""The `components/schemas` of the document: msgspec types, completed from tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

import msgspec

from trunkline.engine.validation import Limits
from trunkline.server.openapi.fields import only
from trunkline.server.openapi.words import Schema, nullable
from trunkline.server.route import Takes

_REFERENCE: Final = "#/components/schemas/{name}"
_ANYTHING: Final = {"x-anything": True}  # msgspec takes no empty schema from a hook


class Schemas:
    """Collects the named schemas that a document refers to."""

    def __init__(self, limits: Limits) -> None:
        self.named: dict[str, Schema] = {}
        self._limits = limits
        self._complete: set[str] = set()

    def of(self, kind: Any) -> Schema:
        """A reference to the schema of a type, or the schema of one that has no name."""
        [schema], named = msgspec.json.schema_components(
            [kind], schema_hook=_any, ref_template=_REFERENCE
        )
        for name, one in named.items():
            self.named.setdefault(name, _plain(one))
        return cast(Schema, _plain(schema))

    def of_body(self, takes: Takes) -> Schema:
        """A reference to the schema of a request body."""
        reference = self.of(takes.kind)
        name = reference.get("$ref", "").rpartition("/")[2]
        if "properties" in self.named.get(name, {}) and name not in self._complete:
            self._complete.add(name)
            self.named[name] = _completed(self.named[name], takes, takes.fields(self._limits))
        return reference


def _any(kind: type) -> Schema:
    """What msgspec does not know: `object` stands for anything, as `Any` does.

    Raises:
        NotImplementedError: it is another type.
    """
    if kind is not object:
        raise NotImplementedError
    return {**_ANYTHING}


def _plain(schema: Any) -> Any:
    """The same schema with the shortest form of "anything"."""
    if isinstance(schema, list):
        return [_plain(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if _ANYTHING.items() <= schema.items():
        return {name: one for name, one in schema.items() if name not in _ANYTHING}
    return {name: _plain(one) for name, one in schema.items()}


def _completed(schema: Schema, takes: Takes, fields: Mapping[str, Mapping[str, Any]]) -> Schema:
    required = [*schema.get("required", []), *takes.required]
    properties: dict[str, Schema] = {}
    for name, typed in schema["properties"].items():
        typed = {key: value for key, value in typed.items() if key != "default"}
        said = dict(fields[name]) if name in fields and _leaves_more_to_say(typed) else typed
        properties[name] = said if name in required else nullable(said)
    for name, neutral in takes.unsupported.items():
        properties[name] = only(neutral)
    for name in takes.bookkeeping:
        properties[name] = {"description": "Accepted, and without effect."}
    given = [
        {"required": [name], "properties": {name: {"not": {"type": "null"}}}}
        for name in takes.one_of
    ]
    return {
        **schema,
        **({"required": required} if required else {}),
        **({"oneOf": given} if given else {}),
        "properties": dict(sorted(properties.items())),
        "additionalProperties": schema.get("additionalProperties", True),
    }


def _leaves_more_to_say(typed: Schema) -> bool:
    """Whether code may check a field of this type further: it is no plain number or flag."""
    kinds = [one.get("type") for one in typed.get("anyOf", [typed])]
    return not {"boolean", "integer", "number"} & {*kinds}
