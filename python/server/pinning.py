"""The header by which a client says which of several engines is to run what it asks for."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from starlette.types import Scope

from trunkline.engine.client import Request
from trunkline.engine.ranks import parse_rank

HEADER: Final = "x-data-parallel-rank"
_MOST_DIGITS: Final = 9


def pinned(requests: list[Request], scope: Scope, dp_size: int) -> list[Request]:
    """The requests, pinned to the engine that the HTTP request's header names, if it has one.

    Raises:
        RequestError: there is no such engine, or the body names another.
    """
    wanted = HEADER.encode()
    values = [value.decode("latin-1") for name, value in scope["headers"] if name == wanted]
    if not values:
        return requests
    text = ", ".join(values).strip()
    plain = text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS
    rank = int(text) if plain else text
    return [
        replace(one, dp_rank=parse_rank({"data_parallel_rank": one.dp_rank, HEADER: rank}, dp_size))
        for one in requests
    ]
