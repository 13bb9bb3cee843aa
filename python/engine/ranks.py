"""Which of several engines a request names. Knows nothing of how they are reached."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from trunkline.engine.validation import RequestError, is_int, shown

FIELDS: Final = ("routed_dp_rank", "data_parallel_rank")  # two names for one thing


def parse_rank(given: Mapping[str, object], dp_size: int) -> int | None:
    """The engine that a request names; None if it names none.

    Args:
        given: values by the names under which the client may give them; null means none.
        dp_size: how many engines there are.

    Raises:
        RequestError: no engine has that number, or two are named.
    """
    named: tuple[str, int] | None = None
    for name, value in given.items():
        if value is None:
            continue
        if not is_int(value) or not 0 <= value < dp_size:  # type: ignore[operator]
            raise RequestError(
                f"{name} must be an integer in [0, {dp_size - 1}], got {shown(value)}: this server "
                f"has --dp-size {dp_size}.",
                name,
            )
        if named is not None and named[1] != value:
            raise RequestError(
                f"{named[0]} is {named[1]} and {name} is {value}: name one engine.", name
            )
        named = name, value  # type: ignore[assignment]
    return None if named is None else named[1]
