"""One endpoint, declared in one place: path, handler, who may call it, what it takes and gives.

Routing, authentication, the names in metrics and the OpenAPI document all follow from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from starlette import routing
from starlette.routing import Match
from starlette.types import Scope

from trunkline.engine.validation import Limits
from trunkline.server.errors import ErrorBody

# public: no key is needed. client: any key. admin: the admin key, where there is one.
Access = Literal["public", "client", "admin"]

JSON: Final = "application/json"
TEXT: Final = "text/plain"
HTML: Final = "text/html"
FORM: Final = "multipart/form-data"


@dataclass(frozen=True, slots=True, kw_only=True)
class Takes:
    """A request body.

    `kind` is the type that validates it, or one that only describes it. `fields` gives the schemas
    of those of its fields that code checks further than their type, plain numbers and flags aside:
    in any case of those typed `Any`. `unsupported` are further fields that may only be null or one
    of the values given; `bookkeeping` are fields without effect. The fields `required` must be
    given, also where `kind` has defaults, and exactly one of the fields `one_of`, if there are any.
    A `kind` that forbids unknown fields is closed; any other body may have more fields.
    """

    kind: Any
    fields: Callable[[Limits], Mapping[str, Mapping[str, Any]]] = lambda _: {}
    unsupported: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    bookkeeping: frozenset[str] = frozenset()
    required: tuple[str, ...] = ()
    one_of: tuple[str, ...] = ()
    media_type: str = JSON
    example: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gives:
    """A successful answer: a body of type `kind` (None: none), or, streamed, events of a type.

    `named_events` have their type as their name, and none says that the stream is over.
    """

    kind: Any = None
    event: Any = None
    named_events: bool = False
    media_type: str = JSON
    status: int = 200
    description: str = "Success."


class Route(routing.Route):
    """A path with its handler, whose docstring tells in the OpenAPI document what it does.

    `gives` must be given; a test fails for a route without it. `query` maps the query parameters
    to their JSON schemas. `errors` are statuses that are particular to it, `error` is the type of
    an error's body.
    """

    def __init__(
        self,
        path: str,
        handler: Callable[..., Any],
        *,
        methods: Sequence[str],
        access: Access = "client",
        **description: Any,
    ) -> None:
        """Declare a route; `description` holds the fields of `Description`."""
        super().__init__(path, handler, methods=list(methods))
        self.access: Access = access
        self.description = Description(**description)


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What the OpenAPI document says of a route, besides its path and its handler's docstring."""

    gives: Gives | None = None
    takes: Takes | None = None
    query: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    errors: Mapping[int, str] = field(default_factory=dict)
    error: Any = ErrorBody


def find(routes: Sequence[Route], scope: Scope) -> tuple[Route | None, bool]:
    """The route of a request, and whether it takes the request's method; None for no path."""
    partial = None
    for route in routes:
        match, _ = route.matches(scope)
        if match is Match.FULL:
            return route, True
        if match is Match.PARTIAL and partial is None:
            partial = route
    return partial, False
