r"""How JSON scalars are written: the canonical spellings that a grammar allows.

A character of a string stands for itself, except `"` and `\`, which are escaped by a backslash,
and control characters: `\b \f \n \r \t`, others `\u00xx` in lower case. An integer has no point and
no exponent. A number without conditions may have an exponent after one digit before the point;
with conditions it is a plain decimal.
"""

from dataclasses import dataclass

from trunkline.engine.grammar.schema.automaton import Automaton, Interval
from trunkline.engine.grammar.schema.rules import (
    EMPTY,
    Class,
    Expression,
    Repeat,
    Rule,
    Text,
    choice,
    repeat,
    sequence,
)

MAX_DIGITS = 64
MAX_INDENT = 24
_INLINE_DEPTH = 16
_DIGITS: tuple[Interval, ...] = ((0x30, 0x39),)
_SHORT = {8: "\\b", 9: "\\t", 10: "\\n", 12: "\\f", 13: "\\r", 0x22: '\\"', 0x5C: "\\\\"}
_PLAIN: tuple[Interval, ...] = (
    (0x20, 0x21),
    (0x23, 0x5B),
    (0x5D, 0xD7FF),
    (0xE000, 0x10FFFF),
)
PLAIN_CHARACTER = Class(_PLAIN)


@dataclass(frozen=True)
class Spacing:
    """The blanks between the tokens of a document; each is an expression."""

    line: Expression
    after_comma: Expression
    after_colon: Expression


def spacing(whitespace: str) -> tuple[Spacing, dict[str, Expression]]:
    """The blanks of a mode and the rules that they need.

    Raises:
        ValueError: The mode is none of `flexible`, `compact`, `spaced`.
    """
    if whitespace == "compact":
        return Spacing(EMPTY, EMPTY, EMPTY), {}
    if whitespace == "spaced":
        return Spacing(EMPTY, Text(" "), Text(" ")), {}
    if whitespace != "flexible":
        raise ValueError(f"whitespace is {whitespace!r}; use flexible, compact or spaced")
    indent = choice([Repeat(Class(((32, 32),)), 0, MAX_INDENT), Repeat(Class(((9, 9),)), 1, 8)])
    rules = {"ws": choice([EMPTY, Text(" "), sequence(Text("\n"), indent)])}
    return Spacing(Rule("ws"), Rule("ws"), Repeat(Text(" "), 0, 1)), rules


def json_text(text: str) -> str:
    """The canonical spelling of a string, with its quotes."""
    return '"' + "".join(map(_json_letter, text)) + '"'


def base_rules(space: Spacing) -> dict[str, Expression]:
    """The rules for values without conditions."""
    digits = Class(_DIGITS)
    fraction = sequence(Text("."), Repeat(digits, 1, MAX_DIGITS))
    exponent = sequence(
        Class(((0x45, 0x45), (0x65, 0x65))),
        Repeat(Class(((0x2B, 0x2B), (0x2D, 0x2D))), 0, 1),
        choice(
            [
                sequence(Class(((0x31, 0x39),)), Repeat(digits, 0, 1)),
                sequence(Class(((0x31, 0x32),)), digits, digits),
                sequence(Text("30"), Class(((0x30, 0x37),))),
            ]
        ),
    )
    positive = sequence(
        Class(((0x31, 0x39),)),
        choice(
            [
                sequence(Repeat(digits, 0, MAX_DIGITS - 1), Repeat(fraction, 0, 1)),
                sequence(Repeat(fraction, 0, 1), exponent),
            ]
        ),
    )
    minus = Repeat(Text("-"), 0, 1)
    member = sequence(Rule("string"), Text(":"), space.after_colon, Rule("any"))
    return {
        "string": sequence(Text('"'), STRING_END),
        "integer": choice(
            [
                Text("0"),
                sequence(minus, Class(((0x31, 0x39),)), Repeat(digits, 0, MAX_DIGITS - 1)),
            ]
        ),
        "number": sequence(minus, choice([sequence(Text("0"), Repeat(fraction, 0, 1)), positive])),
        "boolean": choice([Text("true"), Text("false")]),
        "any": choice(
            [
                Rule("object"),
                Rule("array"),
                Rule("string"),
                Rule("number"),
                Rule("boolean"),
                Text("null"),
            ]
        ),
        "object": bracketed("{", listed(member, 1, None, space), "}", space, empty=True),
        "array": bracketed("[", listed(Rule("any"), 1, None, space), "]", space, empty=True),
    }


def bracketed(
    opening: str, content: Expression, closing: str, space: Spacing, empty: bool
) -> Expression:
    """Content on a line of its own or not, in brackets; `empty`: or nothing between them."""
    inside = sequence(space.line, content, space.line)
    return sequence(Text(opening), repeat(inside, 0, 1) if empty else inside, Text(closing))


def listed(item: Expression, minimum: int, maximum: int | None, space: Spacing) -> Expression:
    """At least one item, with commas between."""
    more = sequence(Text(","), space.after_comma, item)
    rest = repeat(more, max(minimum - 1, 0), None if maximum is None else maximum - 1)
    return sequence(item, rest)


def string_edges(spans: tuple[Interval, ...]) -> tuple[list[Expression], list[Expression]]:
    """One of some characters, as it stands in a JSON string: plain (one class) or escaped."""
    plain = []
    controls: dict[int, list[int]] = {}
    escaped: list[Expression] = []
    for first, last in spans:
        for low, high in _PLAIN:
            if first <= high and last >= low:
                plain.append((max(first, low), min(last, high)))
        for code in (*range(first, min(last, 31) + 1), 0x22, 0x5C):
            if not first <= code <= last:
                continue
            if code in _SHORT:
                escaped.append(Text(_SHORT[code]))
            else:
                controls.setdefault(code >> 4, []).append(code & 15)
    for high, lows in sorted(controls.items()):
        digits = tuple((ord(f"{low:x}"), ord(f"{low:x}")) for low in lows)
        escaped.append(sequence(Text(f"\\u00{high}"), Class(digits)))
    return [Class(tuple(plain))] if plain else [], escaped


def raw_edge(spans: tuple[Interval, ...]) -> Expression:
    """One of some characters, as itself."""
    kept = [
        (max(first, low), min(last, high))
        for first, last in spans
        for low, high in ((0, 0xD7FF), (0xE000, 0x10FFFF))
        if first <= high and last >= low
    ]
    return Class(tuple(kept))


# A loop over alternatives of different lengths makes xgrammar test most tokens at every step; a
# loop over one class does not. So runs of plain characters are loops of their own.
STRING_END = sequence(
    Repeat(PLAIN_CHARACTER, 0, None),
    Repeat(
        sequence(choice(string_edges(((0, 0x10FFFF),))[1]), Repeat(PLAIN_CHARACTER, 0, None)),
        0,
        None,
    ),
    Text('"'),
)
"""The rest of any string, with its closing quote."""


class AutomatonPrinter:
    """Turns automata into right-linear rules; equal automata share theirs."""

    def __init__(self, rules: dict[str, Expression]) -> None:
        self._rules = rules
        self._known: dict[tuple[Automaton, bool, Expression], Expression] = {}

    def text(self, automaton: Automaton, end: Expression = EMPTY) -> Expression:
        """The texts as they are."""
        return self._start(automaton, False, end)

    def quoted(self, automaton: Automaton) -> Expression:
        """The texts as JSON strings."""
        return sequence(Text('"'), self._start(automaton, True, Text('"')))

    def _start(self, automaton: Automaton, escaped: bool, end: Expression) -> Expression:
        key = (automaton, escaped, end)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _Printing(automaton, escaped, end, self._rules).start()
        return known


class _Printing:
    def __init__(
        self, automaton: Automaton, escaped: bool, end: Expression, rules: dict[str, Expression]
    ) -> None:
        self._edges = [automaton.edges(state) for state in range(len(automaton.rows))]
        self._accepting = automaton.accepting
        self._escaped = escaped
        self._end = end
        self._rules = rules
        self._prefix = f"{'s' if escaped else 'n'}{len(rules)}"
        self._indegree = [0] * len(self._edges)
        self._indegree[0] = 2
        for state, edges in enumerate(self._edges):
            for target, spans in edges.items():
                has_escapes = escaped and bool(string_edges(spans)[1])
                self._indegree[target] += 2 if target == state and has_escapes else target != state

    def start(self) -> Expression:
        pending: list[int] = []
        first = self._rule(0, pending)
        for state in pending:
            self._rules[self._name(state)] = self._expression(state, 0, pending)
        return first

    def _name(self, state: int) -> str:
        return f"{self._prefix}_{state}"

    def _expression(self, state: int, depth: int, pending: list[int]) -> Expression:
        parts: list[Expression] = []
        loop: Expression = EMPTY
        for target, spans in self._edges[state].items():
            plain, escaped = string_edges(spans) if self._escaped else ([raw_edge(spans)], [])
            if target == state:
                limit = None if self._escaped else MAX_DIGITS
                loop = repeat(plain[0], 0, limit) if plain else EMPTY
                parts += [sequence(edge, self._rule(state, pending)) for edge in escaped]
            elif self._indegree[target] > 1 or escaped or depth == _INLINE_DEPTH:
                rule = self._rule(target, pending)
                parts += [sequence(edge, rule) for edge in (*plain, *escaped)]
            else:
                parts.append(sequence(*plain, self._expression(target, depth + 1, pending)))
        if state in self._accepting:
            parts.append(self._end)
        return sequence(loop, choice(parts))

    def _rule(self, state: int, pending: list[int]) -> Rule:
        """The rule of a state, to be written later if it is new."""
        name = self._name(state)
        if name not in self._rules:
            self._rules[name] = EMPTY
            pending.append(state)
        return Rule(name)


def _json_letter(letter: str) -> str:
    code = ord(letter)
    short = _SHORT.get(code)
    if short is not None:
        return short
    return letter if code >= 32 else f"\\u{code:04x}"
