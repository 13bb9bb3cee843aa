"""Keywords about one value: `type`, `const`, `enum`, and those of numbers and strings."""

from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

from trunkline.engine.grammar.schema.automaton import TooLarge
from trunkline.engine.grammar.schema.document import Document, Node, SchemaError
from trunkline.engine.grammar.schema.formats import ANNOTATION_FORMATS, FORMATS, INTEGER_FORMATS
from trunkline.engine.grammar.schema.numbers import WHOLE, NumberTest, exact
from trunkline.engine.grammar.schema.regex import RegexError
from trunkline.engine.grammar.schema.shapes import (
    ANYTHING,
    NOTHING,
    TYPES,
    Arrays,
    Booleans,
    Cases,
    Exists,
    Null,
    Numbers,
    Objects,
    Rest,
    Shape,
    Strings,
    StringTest,
    either,
    everything,
    literal,
    meet,
    only,
    restricting,
)
from trunkline.engine.grammar.schema.texts import string_test_automaton

MAX_LENGTH = 100_000
_BOUNDS = {
    "minimum": ("at_least", True),
    "maximum": ("above", False),
    "exclusiveMinimum": ("above", True),
    "exclusiveMaximum": ("at_least", False),
}


def type_cases(node: Node, positive: bool) -> Cases:
    """`type`: one name or a list of names."""
    value = node.schema["type"]
    names = value if isinstance(value, list) else [value]
    for name in names:
        if not isinstance(name, str) or name not in (*TYPES, "integer"):
            raise SchemaError(node.path, "type", f"{name!r} is not a JSON type")
    if isinstance(value, list) and len(set(names)) != len(names):
        raise SchemaError(node.path, "type", "a type is listed twice")
    free = everything()
    result: Cases = {name: free[name] for name in TYPES if (name in names) == positive}
    if "integer" in names and "number" not in names:
        result["number"] = (Numbers(tests=frozenset({WHOLE._replace(holds=positive)})),)
    return result


def const_cases(document: Document, node: Node, positive: bool) -> Cases:
    """`const`."""
    return _values_cases(document, node, [node.schema["const"]], positive)


def enum_cases(document: Document, node: Node, positive: bool) -> Cases:
    """`enum`."""
    values = node.schema["enum"]
    if not isinstance(values, list):
        raise SchemaError(node.path, "enum", "must be an array")
    return _values_cases(document, node, values, positive)


def _values_cases(document: Document, node: Node, values: list[Any], positive: bool) -> Cases:
    texts = sorted({value for value in values if isinstance(value, str)})
    truths = frozenset(value for value in values if isinstance(value, bool))
    numbers = frozenset(
        _number(node, "enum", value)
        for value in values
        if isinstance(value, int | float) and not isinstance(value, bool)
    )
    containers = [value for value in values if isinstance(value, list | dict)]
    _refuse_surrogates(node, texts)
    if positive:
        parts: list[Cases] = [_container(document, node, value) for value in containers]
        if texts:
            parts.append(only("string", Strings(values=frozenset(texts))))
        if truths:
            parts.append(only("boolean", Booleans(truths)))
        if numbers:
            parts.append(only("number", Numbers(values=numbers)))
        if None in values:
            parts.append(only("null", Null()))
        return either(parts)
    result = everything()
    if texts:
        test = StringTest("words", "", tuple(texts), False)
        result["string"] = (Strings(tests=frozenset({test})),)
    tests = frozenset(NumberTest("equal", number, False) for number in numbers)
    result["number"] = (Numbers(tests=tests),)
    result["boolean"] = (Booleans(frozenset({False, True}) - truths),) if len(truths) < 2 else ()
    if None in values:
        result["null"] = ()
    for value in containers:
        result = meet(result, _not_container(document, node, value))
    return result


def _container(document: Document, node: Node, value: list[Any] | dict[str, Any]) -> Cases:
    """Exactly this array or object."""
    if isinstance(value, list):
        heads = tuple(literal(document.constant(item, node.path)) for item in value)
        return only("array", Arrays(heads, NOTHING, len(value), len(value)))
    _refuse_surrogates(node, value)
    names = tuple((key, literal(document.constant(value[key], node.path))) for key in sorted(value))
    rest = Rest(frozenset(value), frozenset(), NOTHING)
    shape = Objects(
        names=names,
        rests=frozenset({rest}),
        required=frozenset(value),
        minimum=len(value),
        order=tuple(value),
    )
    return only("object", shape)


def _not_container(document: Document, node: Node, value: list[Any] | dict[str, Any]) -> Cases:
    """Anything but this array or object."""
    shapes: list[Shape] = []
    if isinstance(value, list):
        if value:
            shapes.append(Arrays(maximum=len(value) - 1))
        shapes.append(Arrays(minimum=len(value) + 1))
        for index, item in enumerate(value):
            differs = literal(document.constant(item, node.path), False)
            heads = (ANYTHING,) * index + (differs,)
            shapes.append(Arrays(heads=heads, minimum=index + 1))
        return restricting("array", *shapes)
    _refuse_surrogates(node, value)
    for key, item in value.items():
        differs = literal(document.constant(item, node.path), False)
        shapes.append(Objects(names=((key, NOTHING),), order=(key,)))
        shapes.append(
            Objects(((key, differs),), required=frozenset({key}), minimum=1, order=(key,))
        )
    extra = Exists(names=frozenset(value))
    shapes.append(Objects(exists=frozenset({extra}), minimum=1))
    return restricting("object", *shapes)


def bound_cases(node: Node, keyword: str, positive: bool) -> Cases:
    """`minimum`, `maximum`, `exclusiveMinimum`, `exclusiveMaximum`."""
    kind, holds = _BOUNDS[keyword]
    test = NumberTest(kind, _number(node, keyword, node.schema[keyword]), holds == positive)
    return _scalar("number", Numbers(tests=frozenset({test})), positive)


def multiple_cases(node: Node, positive: bool) -> Cases:
    """`multipleOf`."""
    divisor = _number(node, "multipleOf", node.schema["multipleOf"])
    if divisor <= 0:
        raise SchemaError(node.path, "multipleOf", "must be above 0")
    shape = Numbers(tests=frozenset({NumberTest("multiple", divisor, positive)}))
    return _scalar("number", shape, positive)


def length_cases(node: Node, keyword: str, positive: bool) -> Cases:
    """`minLength`, `maxLength`."""
    bound = count(node, keyword)
    if keyword == "minLength":
        shape = Strings(minimum=bound) if positive else Strings(maximum=bound - 1)
        return _scalar("string", shape, positive, possible=positive or bound > 0)
    shape = Strings(maximum=bound) if positive else Strings(minimum=bound + 1)
    return _scalar("string", shape, positive)


def pattern_cases(node: Node, positive: bool) -> Cases:
    """`pattern`."""
    test = StringTest("pattern", regex(node, "pattern", node.schema["pattern"]), (), positive)
    return _scalar("string", Strings(tests=frozenset({test})), positive)


def format_cases(node: Node, positive: bool) -> Cases:
    """`format`, as an assertion."""
    name = node.schema["format"]
    if not isinstance(name, str):
        raise SchemaError(node.path, "format", "must be a string")
    if name in FORMATS:
        test = StringTest("format", name, (), positive)
        return _scalar("string", Strings(tests=frozenset({test})), positive)
    if name in INTEGER_FORMATS:
        size = Decimal(2 ** INTEGER_FORMATS[name])
        tests = (WHOLE, NumberTest("at_least", -size, True), NumberTest("at_least", size, False))
        if positive:
            return restricting("number", Numbers(tests=frozenset(tests)))
        return only("number", *(Numbers(tests=frozenset({test.negated()})) for test in tests))
    if name in ANNOTATION_FORMATS:
        return everything() if positive else {}
    known = ", ".join(sorted({*FORMATS, *INTEGER_FORMATS, *ANNOTATION_FORMATS}))
    raise SchemaError(
        node.path, "format", f"{name!r} is not enforced; use `pattern`, or one of {known}"
    )


def count(node: Node, keyword: str) -> int:
    """The value of a keyword that counts."""
    value = node.schema[keyword]
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not whole:
        raise SchemaError(node.path, keyword, "must be a non-negative integer")
    if value < 0:
        raise SchemaError(node.path, keyword, "must be a non-negative integer")
    if value > MAX_LENGTH:
        raise SchemaError(node.path, keyword, f"is {value}, the limit is {MAX_LENGTH}")
    return int(value)


def regex(node: Node, keyword: str, pattern: object) -> str:
    """A pattern, once it is known that it can be enforced."""
    if not isinstance(pattern, str):
        raise SchemaError(node.path, keyword, "must be a string")
    try:
        string_test_automaton(StringTest("pattern", pattern, (), True))
    except RegexError as error:
        raise SchemaError(node.path, keyword, str(error)) from None
    except TooLarge:
        raise SchemaError(
            node.path, keyword, f"{pattern!r} needs too many states; anchor or shorten it"
        ) from None
    return pattern


def _scalar(name: str, shape: Shape, positive: bool, possible: bool = True) -> Cases:
    """The shape besides every other type, or, negated, nothing but the shape."""
    if positive:
        return restricting(name, shape)
    return only(name, shape) if possible else {}


def _number(node: Node, keyword: str, value: object) -> Decimal:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SchemaError(node.path, keyword, "must be a number")
    if value in (float("inf"), float("-inf")) or value != value:
        raise SchemaError(node.path, keyword, "is not a finite number")
    try:
        return exact(value)
    except TooLarge:
        raise SchemaError(node.path, keyword, "has too many digits") from None


def _refuse_surrogates(node: Node, texts: Iterable[str] | Mapping[str, object]) -> None:
    for text in texts:
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise SchemaError(node.path, "enum", f"{text!r} has a lone surrogate")
