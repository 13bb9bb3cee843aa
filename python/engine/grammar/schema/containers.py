"""Keywords about the items of arrays and the members of objects."""

from trunkline.engine.grammar.schema.document import FALSE, TRUE, Document, Node, SchemaError
from trunkline.engine.grammar.schema.scalars import count, regex
from trunkline.engine.grammar.schema.shapes import (
    ANYTHING,
    NOTHING,
    Arrays,
    Cases,
    Count,
    Exists,
    Objects,
    Rest,
    Shape,
    everything,
    literal,
    only,
    restricting,
)


def heads_of(document: Document, node: Node) -> list[int]:
    """The nodes of `prefixItems`, or of an older draft's list of `items`."""
    keyword = "prefixItems" if "prefixItems" in node.schema else "items"
    value = node.schema.get(keyword)
    if keyword == "prefixItems" and isinstance(node.schema.get("items"), list):
        raise SchemaError(node.path, "items", "must be a schema beside `prefixItems`")
    if not isinstance(value, list):
        if keyword == "prefixItems":
            raise SchemaError(node.path, keyword, "must be an array of schemas")
        return []
    return [document.child(node, keyword, index) for index in range(len(value))]


def tail_of(document: Document, node: Node) -> int:
    """The node that items after the heads must meet."""
    keyword = "additionalItems" if isinstance(node.schema.get("items"), list) else "items"
    return document.child(node, keyword) if keyword in node.schema else TRUE


def item_cases(document: Document, node: Node, positive: bool) -> Cases:
    """`prefixItems` and `items` (and an older draft's `additionalItems`)."""
    heads, tail = heads_of(document, node), tail_of(document, node)
    if positive:
        return restricting("array", Arrays(tuple(map(literal, heads)), literal(tail)))
    shapes = [
        Arrays((ANYTHING,) * index + (literal(head, False),), minimum=index + 1)
        for index, head in enumerate(heads)
    ]
    shapes += outside_tail(len(heads), tail)
    return only("array", *shapes)


def outside_tail(start: int, tail: int) -> list[Arrays]:
    """Arrays in which an item from `start` on does not meet the node `tail`."""
    if tail == TRUE:
        return []
    if tail == FALSE:
        return [Arrays(minimum=start + 1)]
    found = Count(start, literal(tail, False), ANYTHING, 1, None)
    return [Arrays(minimum=start + 1, counts=frozenset({found}))]


def size_cases(node: Node, keyword: str, positive: bool) -> Cases:
    """`minItems`, `maxItems`, `minProperties`, `maxProperties`."""
    bound = count(node, keyword)
    name = "array" if keyword.endswith("Items") else "object"
    kind = Arrays if name == "array" else Objects
    if keyword.startswith("min"):
        if positive:
            return restricting(name, kind(minimum=bound))
        return only(name, kind(maximum=bound - 1)) if bound else {}
    if positive:
        return restricting(name, kind(maximum=bound))
    return only(name, kind(minimum=bound + 1))


def unique_cases(node: Node, positive: bool) -> Cases:
    """`uniqueItems`."""
    value = node.schema["uniqueItems"]
    if not isinstance(value, bool):
        raise SchemaError(node.path, "uniqueItems", "must be a boolean")
    if not value:
        return everything() if positive else {}
    if not positive:
        raise SchemaError(node.path, "uniqueItems", "cannot be negated")
    return restricting("array", Arrays(unique=True))


def contains_cases(document: Document, node: Node, positive: bool) -> Cases:
    """`contains` with `minContains` and `maxContains`."""
    child = document.child(node, "contains")
    low = count(node, "minContains") if "minContains" in node.schema else 1
    high = count(node, "maxContains") if "maxContains" in node.schema else None
    inside, outside = literal(child), literal(child, False)
    if positive:
        if high is not None and high < low:
            return restricting("array")
        if not low and high is None:
            return everything()
        counted = Count(
            0, inside if low else ANYTHING, ANYTHING if high is None else outside, low, high
        )
        return restricting("array", Arrays(minimum=low, counts=frozenset({counted})))
    shapes: list[Shape] = []
    if low:
        fewer = Count(0, ANYTHING, outside, 0, low - 1)
        shapes.append(Arrays(counts=frozenset({fewer})))
    if high is not None:
        more = Count(0, inside, ANYTHING, high + 1, None)
        shapes.append(Arrays(minimum=high + 1, counts=frozenset({more})))
    return only("array", *shapes)


def property_cases(document: Document, node: Node, positive: bool) -> Cases:
    """`properties`."""
    names = names_of(document, node, "properties")
    if positive:
        conditions = tuple(sorted((name, literal(child)) for name, child in names.items()))
        return restricting("object", Objects(names=conditions, order=tuple(names)))
    shapes = [
        Objects(
            ((name, literal(child, False)),), required=frozenset({name}), minimum=1, order=(name,)
        )
        for name, child in names.items()
        if child != TRUE
    ]
    return only("object", *shapes)


def pattern_property_cases(document: Document, node: Node, positive: bool) -> Cases:
    """`patternProperties`."""
    patterns = names_of(document, node, "patternProperties")
    for pattern in patterns:
        regex(node, "patternProperties", pattern)
    if positive:
        conditions = frozenset((pattern, literal(child)) for pattern, child in patterns.items())
        return restricting("object", Objects(patterns=conditions))
    shapes: list[Shape] = []
    for pattern, child in patterns.items():
        if child == FALSE:
            shapes.append(Objects(exists=frozenset({Exists(pattern=pattern)}), minimum=1))
        elif child != TRUE:
            raise SchemaError(
                node.path, "patternProperties", "cannot be negated where its values are restricted"
            )
    return only("object", *shapes)


def additional_cases(document: Document, node: Node, positive: bool) -> Cases:
    """`additionalProperties`."""
    names, patterns = own_keys(node)
    child = document.child(node, "additionalProperties")
    return rest_cases(node, "additionalProperties", Rest(names, patterns, literal(child)), positive)


def own_keys(node: Node) -> tuple[frozenset[str], frozenset[str]]:
    """The names and the patterns that a schema's own keywords cover."""
    found = []
    for keyword in ("properties", "patternProperties"):
        value = node.schema.get(keyword, {})
        if not isinstance(value, dict):
            raise SchemaError(node.path, keyword, "must be an object")
        found.append(frozenset(value))
    for pattern in found[1]:
        regex(node, "patternProperties", pattern)
    return found[0], found[1]


def rest_cases(node: Node, keyword: str, rest: Rest, positive: bool) -> Cases:
    """Objects whose other keys meet a condition, or, negated, that have one which does not."""
    if positive:
        return restricting("object", Objects(rests=frozenset({rest})))
    if rest.values == ANYTHING:
        return {}
    if rest.values != NOTHING:
        raise SchemaError(node.path, keyword, "cannot be negated where it restricts values")
    extra = Exists(names=rest.names, without=rest.patterns)
    return only("object", Objects(exists=frozenset({extra}), minimum=1))


def required_cases(node: Node, positive: bool) -> Cases:
    """`required`."""
    names = _strings(node, "required", node.schema["required"])
    if positive:
        shape = Objects(required=frozenset(names), minimum=len(set(names)), order=tuple(names))
        return restricting("object", shape)
    return only("object", *(_lacking(name) for name in names))


def property_name_cases(document: Document, node: Node, positive: bool) -> Cases:
    """`propertyNames`."""
    child = document.child(node, "propertyNames")
    if positive:
        return restricting("object", Objects(keys=literal(child)))
    extra = Exists(key=literal(child, False))
    return only("object", Objects(exists=frozenset({extra}), minimum=1))


def dependent_required_cases(node: Node, positive: bool) -> Cases:
    """`dependentRequired`, one alternative per combination of triggers."""
    value = node.schema["dependentRequired"]
    if not isinstance(value, dict):
        raise SchemaError(node.path, "dependentRequired", "must be an object")
    needs = {name: _strings(node, "dependentRequired", others) for name, others in value.items()}
    if not positive:
        shapes: list[Shape] = []
        for name, others in needs.items():
            shapes += [
                joined
                for other in others
                if (joined := requiring(name).meet(_lacking(other))) is not None
            ]
        return only("object", *shapes)
    alternatives = [Objects()]
    for name, others in needs.items():
        present = Objects(
            required=frozenset({name, *others}), minimum=len({name, *others}), order=(name, *others)
        )
        alternatives = [
            joined
            for shape in alternatives
            for choice in (present, _lacking(name))
            if (joined := shape.meet(choice)) is not None
        ]
        if len(alternatives) > 256:
            raise SchemaError(
                node.path, "dependentRequired", "has too many combinations; the limit is 256"
            )
    return restricting("object", *alternatives)


def requiring(name: str) -> Objects:
    """Objects that have a key."""
    return Objects(required=frozenset({name}), minimum=1, order=(name,))


def _lacking(name: str) -> Objects:
    return Objects(names=((name, NOTHING),), order=(name,))


def names_of(document: Document, node: Node, keyword: str) -> dict[str, int]:
    """The subschemas of a keyword that has an object of them."""
    value = node.schema.get(keyword, {})
    if not isinstance(value, dict):
        raise SchemaError(node.path, keyword, "must be an object")
    for name in value:
        if any("\ud800" <= letter <= "\udfff" for letter in name):
            raise SchemaError(node.path, keyword, f"{name!r} has a lone surrogate")
    return {name: document.child(node, keyword, name) for name in value}


def _strings(node: Node, keyword: str, value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise SchemaError(node.path, keyword, "must be an array of strings")
    return value


def lacking_or(name: str, cases: Cases) -> list[Cases]:
    """Values that are no object with the key `name`, or that have it and are in `cases`."""
    shapes: list[Shape] = []
    for shape in cases.get("object", ()):
        assert isinstance(shape, Objects), "the object alternatives are objects"
        joined = requiring(name).meet(shape)
        if joined is not None:
            shapes.append(joined)
    return [restricting("object", _lacking(name)), only("object", *shapes)]
