"""The grammar of arrays: items by position, counted items, and items that must differ."""

from itertools import product
from typing import TYPE_CHECKING

from trunkline.engine.grammar.schema.automaton import TooLarge
from trunkline.engine.grammar.schema.document import SchemaError
from trunkline.engine.grammar.schema.numbers import spelling
from trunkline.engine.grammar.schema.rules import (
    EMPTY,
    Expression,
    Text,
    choice,
    optional,
    repeat,
    sequence,
)
from trunkline.engine.grammar.schema.shapes import (
    ANYTHING,
    NOTHING,
    Arrays,
    Booleans,
    Count,
    Literals,
    Null,
    Numbers,
    Shape,
    Strings,
    both,
)
from trunkline.engine.grammar.schema.texts import (
    number_values,
    numbers_automaton,
    string_automaton,
    string_values,
)
from trunkline.engine.grammar.schema.words import bracketed, json_text, listed

if TYPE_CHECKING:
    from trunkline.engine.grammar.schema.values import ValueWriter

MAX_DISTINCT = 256
MAX_ANY_ORDER = 6
MAX_POSITIONS = 256


class ArrayWriter:
    """Writes the rules of one array shape.

    Raises:
        SchemaError: `uniqueItems` over items that are not a small finite set, or too many states.
    """

    def __init__(self, values: "ValueWriter", shape: Arrays, path: str) -> None:
        self._values = values
        self._space = values.space
        self._path = path
        maximum = shape.maximum
        if values.alternatives.impossible(shape.tail):
            fixed = len(shape.heads)
            maximum = fixed if maximum is None else min(maximum, fixed)
        unsaid = shape.tail == ANYTHING and not shape.counts and maximum is None
        if values.closed and shape.heads and unsaid:
            maximum = max(len(shape.heads), shape.minimum)
        self._maximum = maximum
        self._shape = shape
        self._counts = sorted(shape.counts, key=repr)

    def expression(self) -> Expression:
        """The whole array."""
        shape = self._shape
        if self._maximum is not None and self._maximum < shape.minimum:
            return choice([])
        if self._maximum == 0:
            content: Expression = choice([])
        elif shape.unique and self._maximum != 1:
            content = self._distinct()
        elif self._counts:
            content = self._counted(0, (0,) * len(self._counts))
        elif shape.heads:
            content = self._positions()
        else:
            item = self._values.value(shape.tail)
            content = listed(item, shape.minimum, self._maximum, self._space)
        empty = not shape.minimum and all(count.minimum == 0 for count in self._counts)
        return bracketed("[", content, "]", self._space, empty)

    def _item(self, index: int, item: Expression) -> Expression:
        return item if index == 0 else sequence(Text(","), self._space.after_comma, item)

    def _positions(self) -> Expression:
        """Items whose conditions depend on the position; at least one."""
        shape, fixed = self._shape, len(self._shape.heads)
        maximum = self._maximum
        tail = repeat(
            self._item(fixed, self._values.value(shape.tail)),
            max(shape.minimum - fixed, 0),
            None if maximum is None else max(maximum - fixed, 0),
        )
        content = tail
        for index in reversed(range(fixed if maximum is None else min(fixed, maximum))):
            item = self._item(index, self._values.value(shape.heads[index]))
            content = self._values.rule("i", sequence(item, content))
            if index >= max(shape.minimum, 1):
                content = optional(content)
        return content

    def _counted(self, index: int, counted: tuple[int, ...]) -> Expression:
        """The items from `index` on, of which `counted` met each counted condition."""
        shape = self._shape
        last = max(len(shape.heads), *(count.start for count in self._counts))
        last = max(last, shape.minimum, self._maximum or 0, 1)
        if last > MAX_POSITIONS:
            message = f"counts over more than {MAX_POSITIONS} positions"
            raise SchemaError(self._path, "contains", message)
        key = (self._shape, self._maximum, index, counted)
        known = self._values.states.get(key)
        if known is not None:
            return known
        rule = self._values.states[key] = self._values.new_rule("k")
        parts: list[Expression] = []
        if index and index >= shape.minimum and self._enough(counted):
            parts.append(EMPTY)
        if self._maximum is None or index < self._maximum:
            for items, after in self._steps(index, counted):
                following = self._counted(min(index + 1, last), after)
                parts.append(sequence(self._item(index, self._values.value(items)), following))
        self._values.define(rule, choice(parts))
        return rule

    def _enough(self, counted: tuple[int, ...]) -> bool:
        return all(
            number >= count.minimum for number, count in zip(counted, self._counts, strict=True)
        )

    def _steps(
        self, index: int, counted: tuple[int, ...]
    ) -> list[tuple[Literals, tuple[int, ...]]]:
        """What the next item may be, with the counts after it."""
        found = []
        options = [
            _options(count, index, number)
            for count, number in zip(self._counts, counted, strict=True)
        ]
        for combination in product(*options):
            items = self._shape.at(index)
            for condition, _ in combination:
                items = both(items, condition)
            if items != NOTHING:
                found.append((items, tuple(number for _, number in combination)))
        return found

    def _distinct(self) -> Expression:
        """Items that all differ; at least one."""
        shape = self._shape
        if self._counts:
            raise SchemaError(self._path, "uniqueItems", "is not supported beside `contains`")
        fixed = len(shape.heads) if self._maximum is None else min(len(shape.heads), self._maximum)
        heads = [self._finite(condition) for condition in shape.heads[:fixed]]
        has_tail = self._maximum is None or self._maximum > fixed
        tail = self._finite(shape.tail) if has_tail else []
        if not heads and len(tail) > MAX_ANY_ORDER:
            return self._ascending(tail, 0, 0)
        if len({text for texts in (*heads, tail) for text in texts}) > MAX_ANY_ORDER + 2:
            message = f"beside `prefixItems` needs at most {MAX_ANY_ORDER + 2} different values"
            raise SchemaError(self._path, "uniqueItems", message)
        return self._any_order(heads, tail, frozenset(), 0)

    def _any_order(
        self, heads: list[list[str]], tail: list[str], used: frozenset[str], index: int
    ) -> Expression:
        key = (tuple(map(tuple, heads)), tuple(tail), self._shape, used, index)
        known = self._values.states.get(key)
        if known is not None:
            return known
        rule = self._values.states[key] = self._values.new_rule("u")
        parts: list[Expression] = []
        if index and index >= self._shape.minimum:
            parts.append(EMPTY)
        if self._maximum is None or index < self._maximum:
            for text in heads[index] if index < len(heads) else tail:
                if text not in used:
                    after = self._any_order(heads, tail, used | {text}, index + 1)
                    parts.append(sequence(self._item(index, Text(text)), after))
        self._values.define(rule, choice(parts))
        return rule

    def _ascending(self, texts: list[str], start: int, index: int) -> Expression:
        """At least one item, in the order of `texts` from `start` on, after `index` items."""
        bounded = self._shape.minimum > 1 or self._maximum is not None
        place = index if bounded else min(index, 1)
        key = (tuple(texts), self._shape, self._maximum, start, place)
        known = self._values.states.get(key)
        if known is not None:
            return known
        rule = self._values.states[key] = self._values.new_rule("u")
        parts: list[Expression] = []
        if start < len(texts) and (self._maximum is None or index < self._maximum):
            more = self._ascending(texts, start + 1, index + 1)
            end = [EMPTY] if index + 1 >= self._shape.minimum else []
            parts.append(sequence(self._item(index, Text(texts[start])), choice([*end, more])))
            parts.append(self._ascending(texts, start + 1, index))
        self._values.define(rule, choice(parts))
        return rule

    def _finite(self, condition: Literals) -> list[str]:
        """The spellings of the values that meet a condition, one for each value."""
        cases = self._values.alternatives.of(condition)
        found: dict[str, None] = {}
        for shapes in cases.values():
            for shape in shapes:
                texts = _spellings(shape)
                if texts is None:
                    raise SchemaError(
                        self._path,
                        "uniqueItems",
                        "is enforced only for null, booleans, enums, and finite sets of strings "
                        "and integers",
                    )
                found.update(dict.fromkeys(texts))
        if len(found) > MAX_DISTINCT:
            message = f"is enforced for at most {MAX_DISTINCT} different values"
            raise SchemaError(self._path, "uniqueItems", message)
        return list(found)


def _options(count: Count, index: int, number: int) -> list[tuple[Literals, int]]:
    if index < count.start:
        return [(ANYTHING, number)]
    options = [(count.others, number)]
    if count.maximum is not None:
        if number < count.maximum:
            options.append((count.items, number + 1))
    elif number < count.minimum:
        options.append((count.items, number + 1))
    return options


def _spellings(shape: Shape) -> list[str] | None:
    match shape:
        case Null():
            return ["null"]
        case Booleans(values):
            return [text for text, value in (("true", True), ("false", False)) if value in values]
        case Strings():
            listed_texts = string_values(shape)
            if listed_texts is None:
                found = _finite_strings(shape)
                listed_texts = None if found is None else tuple(found)
            return None if listed_texts is None else [json_text(text) for text in listed_texts]
        case Numbers():
            numbers = number_values(shape)
            if numbers is not None:
                return [spelling(number) for number in numbers]
            return _finite_numbers(shape)
        case _:
            return None


def _finite_strings(shape: Strings) -> list[str] | None:
    try:
        return string_automaton(shape).strings(MAX_DISTINCT)
    except TooLarge:
        return None


def _finite_numbers(shape: Numbers) -> list[str] | None:
    """The integers of a bounded range; other numbers have several spellings."""
    if not any(test.kind == "whole" and test.holds for test in shape.tests):
        return None
    try:
        return numbers_automaton(shape).strings(MAX_DISTINCT)
    except TooLarge:
        return None
