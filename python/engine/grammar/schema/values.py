"""The rules of values: one per condition, written when it is first needed."""

from collections.abc import Hashable
from itertools import count

from trunkline.engine.grammar.schema.arrays import ArrayWriter
from trunkline.engine.grammar.schema.automaton import Automaton, TooLarge
from trunkline.engine.grammar.schema.cases import ANNOTATIONS, Alternatives
from trunkline.engine.grammar.schema.document import CircularSchema, SchemaError
from trunkline.engine.grammar.schema.numbers import WHOLE, spelling
from trunkline.engine.grammar.schema.objects import ObjectWriter, key_language
from trunkline.engine.grammar.schema.rules import (
    IMPOSSIBLE,
    ROOT,
    Expression,
    Repeat,
    Rule,
    Text,
    choice,
    sequence,
)
from trunkline.engine.grammar.schema.shapes import (
    ANYTHING,
    NOTHING,
    Arrays,
    Booleans,
    Cases,
    Literals,
    Null,
    Numbers,
    Objects,
    Shape,
    Strings,
    both,
    is_free,
    literal,
)
from trunkline.engine.grammar.schema.texts import (
    number_values,
    numbers_automaton,
    string_automaton,
    string_values,
)
from trunkline.engine.grammar.schema.words import (
    PLAIN_CHARACTER,
    STRING_END,
    AutomatonPrinter,
    base_rules,
    json_text,
    spacing,
)

MAX_EXACT_LENGTH = 8
_FREE = {
    "boolean": "boolean",
    "number": "number",
    "string": "string",
    "array": "array",
    "object": "object",
}


class ValueWriter:
    """Collects the rules of a grammar.

    Raises:
        SchemaError: From every method: a condition is not enforced or too large.
    """

    def __init__(self, alternatives: Alternatives, whitespace: str, closed: bool) -> None:
        self.alternatives = alternatives
        self.closed = closed
        self.space, self.rules = spacing(whitespace)
        self.rules.update(base_rules(self.space))
        self.printer = AutomatonPrinter(self.rules)
        self.states: dict[Hashable, Expression] = {}
        self._conditions: dict[Literals, Expression] = {ANYTHING: Rule("any"), NOTHING: IMPOSSIBLE}
        self._shared: dict[Expression, Rule] = {}
        self._pending: list[tuple[Rule, Literals, Cases]] = []
        self._numbers = count()

    def write(self, condition: Literals) -> dict[str, Expression]:
        """All rules of a grammar for the values that meet a condition."""
        self.rules[ROOT] = self.value(condition)
        while self._pending:
            rule, wanted, cases = self._pending.pop()
            path = self._path(wanted)
            try:
                parts = [
                    self._shape(name, shape, path)
                    for name, shapes in cases.items()
                    for shape in shapes
                ]
            except TooLarge:
                message = "needs too many states; use smaller bounds or a simpler pattern"
                raise SchemaError(path, "", message) from None
            self.define(rule, choice(parts))
        return self.rules

    def value(self, condition: Literals) -> Expression:
        """An expression for the values that meet a condition."""
        condition = self._resolved(condition)
        known = self._conditions.get(condition)
        if known is not None:
            return known
        cases = self.alternatives.of(condition)
        if cases == self.alternatives.of(ANYTHING):
            known = Rule("any")
        else:
            known = self.new_rule("v")
            self._pending.append((known, condition, cases))
        self._conditions[condition] = known
        return known

    def key_automaton(self, condition: Literals) -> Automaton:
        """The keys that meet a condition."""
        shapes = self.alternatives.of(condition).get("string", ())
        return key_language([shape for shape in shapes if isinstance(shape, Strings)])

    def rule(self, prefix: str, expression: Expression) -> Expression:
        """A rule for an expression, shared with equal expressions."""
        if isinstance(expression, Rule | Text) or expression == IMPOSSIBLE:
            return expression
        known = self._shared.get(expression)
        if known is None:
            known = self._shared[expression] = self.new_rule(prefix)
            self.define(known, expression)
        return known

    def new_rule(self, prefix: str) -> Rule:
        """A new name; `define` must follow."""
        if len(self.rules) > self.alternatives.limits.rules:
            limit = self.alternatives.limits.rules
            raise SchemaError("#", "", f"needs more than {limit} grammar rules; simplify it")
        rule = Rule(f"{prefix}{next(self._numbers)}")
        self.rules[rule.name] = IMPOSSIBLE
        return rule

    def define(self, rule: Expression, expression: Expression) -> None:
        """Give a new rule its expression."""
        assert isinstance(rule, Rule), "only rules are defined"
        self.rules[rule.name] = expression

    def _path(self, condition: Literals) -> str:
        return self.alternatives.document.node(min(condition)[0]).path

    def _resolved(self, condition: Literals) -> Literals:
        """The condition with nodes that are nothing but a reference replaced by their targets."""
        document = self.alternatives.document
        result = ANYTHING
        for number, positive in condition:
            seen: set[int] = set()
            while number not in seen:
                seen.add(number)
                node = document.node(number)
                if "$ref" not in node.schema or node.schema.keys() - ANNOTATIONS != {"$ref"}:
                    break
                number = document.reference(node)
            else:
                raise CircularSchema(document.node(number).path, "$ref", "leads to itself")
            result = both(result, literal(number, positive))
        return result

    def _shape(self, name: str, shape: Shape, path: str) -> Expression:
        if is_free(name, shape):
            return Text("null") if name == "null" else Rule(_FREE[name])
        match shape:
            case Null():
                return Text("null")
            case Booleans(values):
                return choice(Text("true" if value else "false") for value in sorted(values))
            case Strings():
                return self._string(shape)
            case Numbers():
                return self._number(shape)
            case Arrays():
                return ArrayWriter(self, shape, path).expression()
            case Objects():
                return ObjectWriter(self, shape, path).expression()

    def _string(self, shape: Strings) -> Expression:
        values = string_values(shape)
        if values is not None:
            return choice(Text(json_text(text)) for text in values)
        if not shape.tests and max(shape.minimum, shape.maximum or 0) > MAX_EXACT_LENGTH:
            return _long_string(shape)
        automaton = string_automaton(shape)
        return IMPOSSIBLE if automaton.is_empty() else self.printer.quoted(automaton)

    def _number(self, shape: Numbers) -> Expression:
        values = number_values(shape)
        if values is not None:
            return choice(Text(spelling(value)) for value in values)
        if shape.tests == frozenset({WHOLE}):
            return Rule("integer")
        automaton = numbers_automaton(shape)
        return IMPOSSIBLE if automaton.is_empty() else self.printer.text(automaton)


def _long_string(shape: Strings) -> Expression:
    """A string with bounds on its length, counted over characters that need no escape.

    xgrammar counts repetitions of one class at no cost, and of anything else at a high one.
    """
    counted = Repeat(PLAIN_CHARACTER, shape.minimum, shape.maximum)
    if shape.maximum is not None:
        return sequence(Text('"'), counted, Text('"'))
    return sequence(Text('"'), Repeat(PLAIN_CHARACTER, shape.minimum, shape.minimum), STRING_END)
