"""`unevaluatedProperties` and `unevaluatedItems`: what the other keywords have looked at.

Which keys and items those are depends on which subschemas hold. So every combination of the
conditional ones (`anyOf`, `oneOf`, `if`, `dependentSchemas`) becomes an alternative of its own.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trunkline.engine.grammar.schema.containers import (
    heads_of,
    names_of,
    outside_tail,
    own_keys,
    rest_cases,
)
from trunkline.engine.grammar.schema.document import Node, SchemaError
from trunkline.engine.grammar.schema.shapes import (
    ANYTHING,
    NOTHING,
    Arrays,
    Cases,
    Literals,
    Rest,
    both,
    either,
    everything,
    literal,
    only,
    restricting,
)

if TYPE_CHECKING:
    from trunkline.engine.grammar.schema.cases import Alternatives

MAX_COMBINATIONS = 64
_ALL_KEYWORDS = {
    "unevaluatedProperties": ("additionalProperties", "unevaluatedProperties"),
    "unevaluatedItems": ("unevaluatedItems",),
}


@dataclass(frozen=True)
class _Seen:
    """What is evaluated once `condition` holds."""

    condition: Literals = ANYTHING
    names: frozenset[str] = frozenset()
    patterns: frozenset[str] = frozenset()
    items: int = 0
    everything: bool = False

    def plus(self, other: "_Seen") -> "_Seen":
        return _Seen(
            both(self.condition, other.condition),
            self.names | other.names,
            self.patterns | other.patterns,
            max(self.items, other.items),
            self.everything or other.everything,
        )


def unevaluated_cases(
    alternatives: "Alternatives", keyword: str, node: Node, positive: bool
) -> Cases:
    """The alternatives of one of the two keywords."""
    child = alternatives.document.child(node, keyword)
    collector = _Collector(alternatives, keyword)
    parts = []
    for seen in collector.of(node, own=False):
        part = _part(keyword, node, child, seen, positive)
        if seen.condition != ANYTHING:
            part = alternatives.meet(part, alternatives.of(seen.condition), node)
        parts.append(part)
    return either(parts)


def _part(keyword: str, node: Node, child: int, seen: _Seen, positive: bool) -> Cases:
    if seen.everything:
        return everything() if positive else {}
    if keyword == "unevaluatedProperties":
        rest = Rest(seen.names, seen.patterns, literal(child))
        return rest_cases(node, keyword, rest, positive)
    if positive:
        return restricting("array", Arrays((ANYTHING,) * seen.items, literal(child)))
    return only("array", *outside_tail(seen.items, child))


class _Collector:
    """Walks the subschemas that apply to the same value."""

    def __init__(self, alternatives: "Alternatives", keyword: str) -> None:
        self._document = alternatives.document
        self._alternatives = alternatives
        self._keyword = keyword
        self._open: set[int] = set()

    def of(self, node: Node, own: bool = True) -> list[_Seen]:
        """The combinations below a node that holds; `own`: its own unevaluated keyword counts."""
        if node.number in self._open:
            raise SchemaError(node.path, self._keyword, "is not supported where schemas recurse")
        self._open.add(node.number)
        result = [self._own(node, own)]
        schema = node.schema
        if "$ref" in schema:
            result = self._product(node, result, self._child(self._document.reference(node)))
        for keyword in ("allOf", "anyOf", "oneOf"):
            if keyword not in schema:
                continue
            for child in self._alternatives.branches(node, keyword):
                found = self._child(child) if keyword == "allOf" else self._optional(child, child)
                result = self._product(node, result, found)
        if "if" in schema:
            result = self._product(node, result, self._conditional(node))
        for name, child in names_of(self._document, node, "dependentSchemas").items():
            trigger = self._document.derived({"type": "object", "required": [name]}, node)
            result = self._product(node, result, self._optional(trigger, child))
        self._open.discard(node.number)
        return result

    def _own(self, node: Node, own: bool) -> _Seen:
        schema = node.schema
        covering = _ALL_KEYWORDS[self._keyword]
        whole = any(keyword in schema for keyword in covering if own or keyword != self._keyword)
        if self._keyword == "unevaluatedProperties":
            names, patterns = own_keys(node)
            return _Seen(names=names, patterns=patterns, everything=whole)
        if "contains" in schema:
            raise SchemaError(node.path, self._keyword, "is not supported beside `contains`")
        heads = heads_of(self._document, node)
        whole = whole or "additionalItems" in schema or isinstance(schema.get("items"), dict | bool)
        return _Seen(items=len(heads), everything=whole)

    def _child(self, number: int) -> list[_Seen]:
        return self.of(self._document.node(number))

    def _optional(self, trigger: int, child: int) -> list[_Seen]:
        """What `child` evaluates if `trigger` holds, and nothing if it does not."""
        inside = self._child(child)
        if inside == [_Seen()]:
            return inside
        held = [seen.plus(_Seen(literal(trigger))) for seen in inside]
        return [*held, _Seen(literal(trigger, False))]

    def _conditional(self, node: Node) -> list[_Seen]:
        condition = self._document.child(node, "if")
        branches: dict[bool, list[_Seen]] = {True: self._child(condition), False: [_Seen()]}
        for keyword, holds in (("then", True), ("else", False)):
            if keyword in node.schema:
                branch = self._child(self._document.child(node, keyword))
                branches[holds] = self._product(node, branches[holds], branch)
        if branches[True] == branches[False] == [_Seen()]:
            return branches[True]
        return [
            seen.plus(_Seen(literal(condition, holds)))
            for holds, found in branches.items()
            for seen in found
        ]

    def _product(self, node: Node, left: list[_Seen], right: list[_Seen]) -> list[_Seen]:
        result = [
            joined
            for first in left
            for second in right
            if (joined := first.plus(second)).condition != NOTHING
            and not self._alternatives.impossible(joined.condition)
        ]
        if len(result) > MAX_COMBINATIONS:
            message = f"has more than {MAX_COMBINATIONS} combinations of subschemas"
            raise SchemaError(node.path, self._keyword, message)
        return list(dict.fromkeys(result))
