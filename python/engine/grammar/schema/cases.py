"""From conditions on nodes to the alternatives of shapes that meet them.

Owns the meaning of every keyword that combines schemas, and which keywords exist at all: one that
is neither enforced nor a known annotation is refused here.
"""

from collections.abc import Callable
from functools import partial

from trunkline.engine.grammar.schema.containers import (
    additional_cases,
    contains_cases,
    dependent_required_cases,
    item_cases,
    lacking_or,
    names_of,
    pattern_property_cases,
    property_cases,
    property_name_cases,
    required_cases,
    requiring,
    size_cases,
    unique_cases,
)
from trunkline.engine.grammar.schema.document import (
    CircularSchema,
    Document,
    Limits,
    Node,
    SchemaError,
)
from trunkline.engine.grammar.schema.emptiness import Emptiness
from trunkline.engine.grammar.schema.scalars import (
    bound_cases,
    const_cases,
    enum_cases,
    format_cases,
    length_cases,
    multiple_cases,
    pattern_cases,
    type_cases,
)
from trunkline.engine.grammar.schema.shapes import (
    ANYTHING,
    Cases,
    Literals,
    both,
    either,
    everything,
    literal,
    meet,
    only,
)
from trunkline.engine.grammar.schema.unevaluated import unevaluated_cases
from trunkline.engine.suggestions import did_you_mean

ANNOTATIONS = frozenset(
    "title description default examples example deprecated readOnly writeOnly $comment $schema "
    "$id $anchor $dynamicAnchor $defs definitions contentEncoding contentMediaType contentSchema "
    "discriminator externalDocs xml enumNames enumDescriptions markdownDescription "
    "propertyOrdering".split()
)
"""Keywords that say nothing about which values are valid."""

_PARTNERS = {
    "prefixItems": "items", "additionalItems": "items", "then": "if", "else": "if",
    "minContains": "contains", "maxContains": "contains",
}  # fmt: skip
"""Keywords that only have a meaning with another one, which handles them."""

_DRAFTS = frozenset(
    f"{scheme}://json-schema.org/{draft}"
    for scheme in ("http", "https")
    for draft in (
        "draft/2020-12/schema",
        "draft/2019-09/schema",
        *(f"draft-{number}/schema" for number in ("07", "06", "04")),
        "schema",
    )
)

_Keyword = Callable[[Node, bool], Cases]


class Alternatives:
    """The alternatives of conditions, each computed once.

    Raises:
        SchemaError: From every method: the schema is malformed or not enforced.
    """

    def __init__(self, document: Document, limits: Limits, assert_formats: bool) -> None:
        self.document = document
        self.limits = limits
        self._emptiness = Emptiness(self.of)
        self._known: dict[Literals, Cases] = {}
        self._nodes: dict[tuple[int, bool], Cases] = {}
        self._open: set[tuple[int, bool]] = set()
        self._steps = 0
        self._keywords = self._table(assert_formats)

    def of(self, condition: Literals) -> Cases:
        """The alternatives of a conjunction of nodes."""
        known = self._known.get(condition)
        if known is None:
            known = everything()
            for node, positive in sorted(condition):
                known = self.meet(known, self.of_node(node, positive), self.document.node(node))
            self._known[condition] = known
        return known

    def of_node(self, number: int, positive: bool) -> Cases:
        """The alternatives of one node, or of its negation."""
        key = (number, positive)
        known = self._nodes.get(key)
        if known is not None:
            return known
        node = self.document.node(number)
        if key in self._open:
            raise CircularSchema(
                node.path, "$ref", "leads to itself with no object or array between"
            )
        if len(self._open) >= self.limits.schema_depth:
            raise SchemaError(
                node.path, "", f"combines schemas deeper than {self.limits.schema_depth} levels"
            )
        self._open.add(key)
        try:
            parts = [handler(node, positive) for handler in self._handlers(node)]
        finally:
            self._open.discard(key)
        if positive:
            result = everything()
            for part in parts:
                result = self.meet(result, part, node)
        else:
            result = self._bounded(either(parts), node)
        self._nodes[key] = result
        return result

    def meet(self, left: Cases, right: Cases, node: Node) -> Cases:
        """`meet`, bounded; `node` is blamed."""
        self._steps += 1 + sum(
            len(shapes) * len(right.get(name, ())) for name, shapes in left.items()
        )
        if self._steps > self.limits.steps:
            raise SchemaError(
                node.path, "", "has too many combinations of alternatives; simplify it"
            )
        return self._bounded(meet(left, right), node)

    def impossible(self, condition: Literals) -> bool:
        """Whether it is proven that no value meets the condition."""
        return self._emptiness.proven(condition)

    def _bounded(self, cases: Cases, node: Node) -> Cases:
        most = max((len(shapes) for shapes in cases.values()), default=0)
        if most > self.limits.branches:
            raise SchemaError(
                node.path, "", f"has {most} alternatives, the limit is {self.limits.branches}"
            )
        return cases

    def _handlers(self, node: Node) -> list[_Keyword]:
        handlers: dict[str, _Keyword] = {}
        for keyword in node.schema:
            if keyword in ANNOTATIONS or keyword.startswith("x-"):
                if keyword == "$schema":
                    _check_draft(node)
                continue
            partner = _PARTNERS.get(keyword)
            if partner is not None:
                if partner in node.schema or keyword == "prefixItems":
                    handlers.setdefault(partner, self._keywords[partner])
                continue
            if keyword not in self._keywords:
                guess = f"is not supported{did_you_mean(keyword, self._keywords)}"
                raise SchemaError(node.path, keyword, _REMEDIES.get(keyword, guess))
            handlers.setdefault(keyword, self._keywords[keyword])
        return list(handlers.values())

    def _table(self, assert_formats: bool) -> dict[str, _Keyword]:
        document = self.document
        table: dict[str, _Keyword] = {
            "type": type_cases,
            "const": partial(const_cases, document),
            "enum": partial(enum_cases, document),
            "multipleOf": multiple_cases,
            "pattern": pattern_cases,
            "format": format_cases if assert_formats else _annotation,
            "items": partial(item_cases, document),
            "uniqueItems": unique_cases,
            "contains": partial(contains_cases, document),
            "properties": partial(property_cases, document),
            "patternProperties": partial(pattern_property_cases, document),
            "additionalProperties": partial(additional_cases, document),
            "required": required_cases,
            "propertyNames": partial(property_name_cases, document),
            "dependentRequired": dependent_required_cases,
            "dependentSchemas": self._dependent_schemas,
            "allOf": self._all_of,
            "anyOf": self._any_of,
            "oneOf": self._one_of,
            "not": self._not,
            "if": self._if,
            "$ref": self._reference,
            "unevaluatedProperties": partial(unevaluated_cases, self, "unevaluatedProperties"),
            "unevaluatedItems": partial(unevaluated_cases, self, "unevaluatedItems"),
        }
        for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            table[keyword] = partial(_named, bound_cases, keyword)
        for keyword in ("minLength", "maxLength"):
            table[keyword] = partial(_named, length_cases, keyword)
        for keyword in ("minItems", "maxItems", "minProperties", "maxProperties"):
            table[keyword] = partial(_named, size_cases, keyword)
        return table

    def branches(self, node: Node, keyword: str) -> list[int]:
        """The subschemas of a keyword that has a list of them."""
        value = node.schema[keyword]
        if not isinstance(value, list) or not value:
            raise SchemaError(node.path, keyword, "must be a non-empty array of schemas")
        return [self.document.child(node, keyword, index) for index in range(len(value))]

    def _all(self, branches: list[int], positive: bool, node: Node) -> Cases:
        result = everything()
        for branch in branches:
            result = self.meet(result, self.of(literal(branch, positive)), node)
        return result

    def _any(self, branches: list[int], positive: bool, node: Node) -> Cases:
        parts = [self.of(literal(branch, positive)) for branch in branches]
        return self._bounded(either(parts), node)

    def _all_of(self, node: Node, positive: bool) -> Cases:
        branches = self.branches(node, "allOf")
        return (self._all if positive else self._any)(branches, positive, node)

    def _any_of(self, node: Node, positive: bool) -> Cases:
        branches = self.branches(node, "anyOf")
        return (self._any if positive else self._all)(branches, positive, node)

    def _one_of(self, node: Node, positive: bool) -> Cases:
        branches = [literal(branch) for branch in self.branches(node, "oneOf")]
        inverses = [literal(branch, False) for branch in self.branches(node, "oneOf")]
        overlaps = [
            [
                index
                for index in range(len(branches))
                if index != first and not self.impossible(both(branches[first], branches[index]))
            ]
            for first in range(len(branches))
        ]
        if positive:
            parts = []
            for first, others in enumerate(overlaps):
                condition = branches[first]
                for index in others:
                    condition = both(condition, inverses[index])
                if branches[first] not in [branches[index] for index in others]:
                    parts.append(self.of(condition))
            return self._bounded(either(parts), node)
        none = self._all(self.branches(node, "oneOf"), False, node)
        pairs = [
            self.of(both(branches[first], branches[index]))
            for first, others in enumerate(overlaps)
            for index in others
            if index > first
        ]
        return self._bounded(either([none, *pairs]), node)

    def _not(self, node: Node, positive: bool) -> Cases:
        return self.of(literal(self.document.child(node, "not"), not positive))

    def _if(self, node: Node, positive: bool) -> Cases:
        condition = self.document.child(node, "if")
        if "then" not in node.schema and "else" not in node.schema:
            return everything() if positive else {}
        parts = []
        for keyword, holds in (("then", True), ("else", False)):
            branch = ANYTHING
            if keyword in node.schema:
                branch = literal(self.document.child(node, keyword), positive)
            elif not positive:
                continue
            parts.append(self.of(both(literal(condition, holds), branch)))
        return self._bounded(either(parts), node)

    def _reference(self, node: Node, positive: bool) -> Cases:
        return self.of(literal(self.document.reference(node), positive))

    def _dependent_schemas(self, node: Node, positive: bool) -> Cases:
        result, broken = everything(), []
        for name, number in names_of(self.document, node, "dependentSchemas").items():
            child = literal(number, positive)
            if positive:
                parts = lacking_or(name, self.of(child))
                result = self.meet(result, either(parts), node)
            else:
                broken.append(self.meet(only("object", requiring(name)), self.of(child), node))
        return result if positive else self._bounded(either(broken), node)


_REMEDIES = {
    "nullable": 'is not JSON Schema; add "null" to `type`, or use `anyOf`',
    "dependencies": "is not supported; use `dependentRequired` or `dependentSchemas`",
    "$dynamicRef": "is not supported; use `$ref`",
    "$recursiveRef": "is not supported; use `$ref`",
    "$vocabulary": "is not supported",
    "id": "is not supported; use `$id`",
}


def _named(
    function: Callable[[Node, str, bool], Cases], keyword: str, node: Node, positive: bool
) -> Cases:
    return function(node, keyword, positive)


def _annotation(node: Node, positive: bool) -> Cases:
    return everything() if positive else {}


def _check_draft(node: Node) -> None:
    draft = node.schema["$schema"]
    if not isinstance(draft, str) or draft.rstrip("#") not in _DRAFTS:
        raise SchemaError(node.path, "$schema", f"{draft!r} is not a known draft of JSON Schema")
