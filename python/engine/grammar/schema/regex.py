r"""Regular expressions as JSON Schema means them (ECMA-262), turned into automata.

Supported: literals, `.`, classes, `\d \D \w \W \s \S` (ASCII digits and words, ECMA's blanks),
`\t \n \r \f \v \0 \cX \xHH \uHHHH \u{H..} \UHHHHHHHH`, `\p{..}` and `\P{..}` for general
categories, groups (plain, non-capturing, named), alternatives, greedy and lazy quantifiers,
`^ $ \A \Z \z` anywhere, and look-aheads directly after a leading `^`.
Refused with `RegexError`: back-references, `\b \B`, other look-arounds, inline flags, possessive
quantifiers and atomic groups, script properties.
"""

import sys
import unicodedata
from dataclasses import dataclass
from functools import lru_cache

from trunkline.engine.grammar.schema.automaton import (
    Automaton,
    Interval,
    build,
    complement,
    intersection,
)

MAX_REPEAT = 4096
MAX_NODES = 20_000
MAX_DEPTH = 64
_ALL: tuple[Interval, ...] = ((0, sys.maxunicode),)
_LINE_ENDS = ((10, 10), (13, 13), (0x2028, 0x2029))
_DIGITS = ((48, 57),)
_WORDS = ((48, 57), (65, 90), (95, 95), (97, 122))
_BLANKS = (
    (9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
    (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
)  # fmt: skip
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0, "a": 7, "e": 27}
_CATEGORIES = {
    "Letter": "L", "Uppercase_Letter": "Lu", "Lowercase_Letter": "Ll", "Mark": "M", "Number": "N",
    "Decimal_Number": "Nd", "Punctuation": "P", "Symbol": "S", "Separator": "Z", "digit": "Nd",
}  # fmt: skip
_KNOWN_CATEGORIES = frozenset(
    "L Lu Ll Lt Lm Lo M Mn Mc Me N Nd Nl No P Pc Pd Ps Pe Pi Pf Po S Sm Sc Sk So Z Zs Zl Zp".split()
)


class RegexError(ValueError):
    """The expression is malformed, or uses what an automaton cannot express."""


@dataclass(frozen=True)
class Chars:
    spans: tuple[Interval, ...]


@dataclass(frozen=True)
class Anchor:
    at_start: bool


@dataclass(frozen=True)
class Sequence:
    parts: "tuple[Node, ...]"


@dataclass(frozen=True)
class Choice:
    parts: "tuple[Node, ...]"


@dataclass(frozen=True)
class Repeat:
    part: "Node"
    minimum: int
    maximum: int | None


@dataclass(frozen=True)
class LookAhead:
    part: "Node"
    positive: bool


Node = Chars | Anchor | Sequence | Choice | Repeat | LookAhead


@lru_cache(maxsize=256)
def regex_automaton(pattern: str, whole: bool = False) -> Automaton:
    """The texts in which `pattern` matches somewhere, or the texts that it matches as a `whole`.

    Raises:
        RegexError: The pattern is malformed or not supported.
        TooLarge: The automaton has too many states.
    """
    if "\0" in pattern:
        raise RegexError("a NUL character is not supported; write \\0")
    return _language(_Parser(pattern).parse(), whole)


def _language(node: Node, whole: bool) -> Automaton:
    parts = node.parts if isinstance(node, Sequence) else (node,)
    if len(parts) > 1 and parts[0] == Anchor(True) and isinstance(parts[1], LookAhead):
        rest = _language(Sequence((parts[0], *parts[2:])), whole)
        ahead = _language(Sequence((Anchor(True), parts[1].part)), False)
        return intersection([rest, ahead if parts[1].positive else complement(ahead)])
    return _Machine(node, whole).automaton()


class _Parser:
    """Recursive descent over the pattern; `_at` is the next character."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._depth = 0

    def parse(self) -> Node:
        node = self._choice()
        if self._at < len(self._pattern):
            raise self._error("unbalanced )")
        return node

    def _error(self, message: str) -> RegexError:
        return RegexError(f"{message}, at character {self._at} of {self._pattern!r}")

    def _peek(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _take(self, text: str) -> bool:
        if self._pattern.startswith(text, self._at):
            self._at += len(text)
            return True
        return False

    def _choice(self) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(f"groups are nested deeper than {MAX_DEPTH}")
        parts = [self._sequence()]
        while self._take("|"):
            parts.append(self._sequence())
        self._depth -= 1
        return parts[0] if len(parts) == 1 else Choice(tuple(parts))

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while self._peek() not in ("", "|", ")"):
            parts.append(self._quantified())
        return Sequence(tuple(parts))

    def _quantified(self) -> Node:
        node = self._atom()
        bounds = self._bounds()
        if bounds is None:
            return node
        if isinstance(node, Anchor | LookAhead):
            raise self._error("a quantifier needs something to repeat")
        if not self._take("?") and self._peek() == "+":
            raise self._error("possessive quantifiers are not supported")
        if self._bounds() is not None:
            raise self._error("multiple quantifiers")
        return Repeat(node, *bounds)

    def _bounds(self) -> tuple[int, int | None] | None:
        simple = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(self._peek())
        if simple is not None:
            self._at += 1
            return simple
        end = self._pattern.find("}", self._at)
        if self._peek() != "{" or end < 0:
            return None
        low, comma, high = self._pattern[self._at + 1 : end].partition(",")
        if not (
            low.isascii() and low.isdigit() and (not high or (high.isascii() and high.isdigit()))
        ):
            return None
        if len(low) > 9 or len(high) > 9:
            raise self._error(f"a repetition is limited to {MAX_REPEAT}")
        self._at = end + 1
        minimum = int(low)
        maximum = int(high) if high else (None if comma else minimum)
        if maximum is not None and maximum < minimum:
            raise self._error("a repetition's minimum is above its maximum")
        if max(minimum, maximum or 0) > MAX_REPEAT:
            raise self._error(f"a repetition is limited to {MAX_REPEAT}")
        return minimum, maximum

    def _atom(self) -> Node:
        character = self._peek()
        if character in "*+?":
            raise self._error("nothing to repeat")
        self._at += 1
        if character == "(":
            return self._group()
        if character == "[":
            return Chars(self._class())
        if character == ".":
            return Chars(_without(_ALL, _LINE_ENDS))
        if character in "^$":
            return Anchor(character == "^")
        if character == "\\":
            return self._escape_atom()
        return Chars(((ord(character), ord(character)),))

    def _group(self) -> Node:
        ahead: bool | None = None
        if self._take("?"):
            if self._take("=") or self._take("!"):
                ahead = self._pattern[self._at - 1] == "="
            elif self._pattern.startswith(("<=", "<!"), self._at):
                raise self._error("look-behind is not supported")
            elif self._take("P<") or self._take("<"):
                end = self._pattern.find(">", self._at)
                if not self._pattern[self._at : max(end, 0)].isidentifier():
                    raise self._error("a group's name is malformed")
                self._at = end + 1
            elif not self._take(":"):
                raise self._error("this kind of group is not supported")
        node = self._choice()
        if not self._take(")"):
            raise self._error("missing )")
        return node if ahead is None else LookAhead(node, ahead)

    def _escape_atom(self) -> Node:
        character = self._peek()
        if character in ("A", "Z", "z"):
            self._at += 1
            return Anchor(character == "A")
        if character in ("b", "B"):
            raise self._error("word boundaries are not supported")
        if character in "123456789k" and character:
            raise self._error("back-references are not supported")
        return Chars(self._escape())

    def _escape(self) -> tuple[Interval, ...]:
        character = self._peek()
        if not character:
            raise self._error("a trailing backslash")
        self._at += 1
        named = {"d": _DIGITS, "w": _WORDS, "s": _BLANKS}.get(character.lower())
        if named is not None:
            return named if character.islower() else _without(_ALL, named)
        if character in "pP":
            spans = self._property()
            return spans if character == "p" else _without(_ALL, spans)
        code = self._code(character)
        return ((code, code),)

    def _code(self, character: str) -> int:
        if character == "u" and self._take("{"):
            end = self._pattern.find("}", self._at)
            code = self._hexadecimal(max(end - self._at, 0))
            self._at += 1
            return code
        if character in "xuU":
            code = self._hexadecimal({"x": 2, "u": 4, "U": 8}[character])
            if 0xD800 <= code < 0xDC00 and self._take("\\u"):
                low = self._hexadecimal(4)
                if not 0xDC00 <= low < 0xE000:
                    raise self._error("a surrogate without its pair")
                return 0x10000 + ((code - 0xD800) << 10) + low - 0xDC00
            return code
        if character == "c":
            letter = self._peek()
            if not (letter.isascii() and letter.isalpha()):
                raise self._error("\\c needs a letter")
            self._at += 1
            return ord(letter) % 32
        if character in _CONTROLS:
            return _CONTROLS[character]
        if character.isalnum():
            raise self._error(f"the escape \\{character} is not supported")
        return ord(character)

    def _hexadecimal(self, length: int) -> int:
        digits = self._pattern[self._at : self._at + length]
        allowed = set("0123456789abcdefABCDEF")
        if not 0 < length <= 8 or len(digits) < length or not set(digits) <= allowed:
            raise self._error("a code point's digits are malformed")
        self._at += length
        code = int(digits, 16)
        if code > sys.maxunicode:
            raise self._error("a code point above U+10FFFF")
        return code

    def _property(self) -> tuple[Interval, ...]:
        end = self._pattern.find("}", self._at)
        if not self._take("{") or end < 0:
            raise self._error("\\p needs {category}")
        name = self._pattern[self._at : end]
        self._at = end + 1
        name = name.removeprefix("General_Category=").removeprefix("gc=")
        category = _CATEGORIES.get(name, name)
        if category not in _KNOWN_CATEGORIES:
            raise self._error(f"the property {name!r} is not supported, only general categories")
        return _category(category)

    def _class(self) -> tuple[Interval, ...]:
        negated = self._take("^")
        spans: list[Interval] = []
        while not self._take("]"):
            low = self._class_member()
            if self._peek() == "-" and self._pattern[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = self._class_member()
                if len(low) != 1 or len(high) != 1 or low[0][0] != low[0][1]:
                    raise self._error("a range needs single characters")
                if high[0][0] != high[0][1] or high[0][0] < low[0][0]:
                    raise self._error("a range is reversed or malformed")
                low = ((low[0][0], high[0][0]),)
            spans.extend(low)
        merged = _merged(spans)
        return _without(_ALL, merged) if negated else merged

    def _class_member(self) -> tuple[Interval, ...]:
        character = self._peek()
        if not character:
            raise self._error("missing ]")
        self._at += 1
        if character != "\\":
            return ((ord(character), ord(character)),)
        if self._take("b"):
            return ((8, 8),)
        return self._escape()


class _Machine:
    """Thompson's construction, with steps that only the start or the end of the text allows."""

    def __init__(self, node: Node, whole: bool) -> None:
        self._free: list[list[int]] = []
        self._anchored: list[list[tuple[bool, int]]] = []
        self._moves: list[list[tuple[tuple[Interval, ...], int]]] = []
        start, end = self._node(), self._node()
        first, last = self._fragment(node)
        self._free[start].append(first)
        self._free[last].append(end)
        if not whole:
            self._moves[start].append((_ALL, start))
            self._moves[end].append((_ALL, end))
        self._start, self._end = start, end

    def automaton(self) -> Automaton:
        cuts = {
            bound
            for moves in self._moves
            for spans, _ in moves
            for first, last in spans
            for bound in (first, last + 1)
        }
        first = self._closure(frozenset((self._start,)), at_start=True, at_end=False)

        def step(
            state: tuple[bool, frozenset[int]], code: int
        ) -> tuple[bool, frozenset[int]] | None:
            reached = frozenset(
                target
                for number in state[1]
                for spans, target in self._moves[number]
                if any(low <= code <= high for low, high in spans)
            )
            return (False, self._closure(reached, False, False)) if reached else None

        def accept(state: tuple[bool, frozenset[int]]) -> bool:
            return self._end in self._closure(state[1], at_start=state[0], at_end=True)

        return build((True, first), cuts, step, accept)

    def _node(self) -> int:
        if len(self._free) >= MAX_NODES:
            raise RegexError(f"the expression is too long: more than {MAX_NODES} positions")
        self._free.append([])
        self._anchored.append([])
        self._moves.append([])
        return len(self._free) - 1

    def _closure(self, states: frozenset[int], at_start: bool, at_end: bool) -> frozenset[int]:
        seen = set(states)
        pending = list(states)
        while pending:
            number = pending.pop()
            targets = self._free[number] + [
                target
                for needs_start, target in self._anchored[number]
                if (at_start if needs_start else at_end)
            ]
            for target in targets:
                if target not in seen:
                    seen.add(target)
                    pending.append(target)
        return frozenset(seen)

    def _fragment(self, node: Node) -> tuple[int, int]:
        first, last = self._node(), self._node()
        match node:
            case Chars(spans):
                self._moves[first].append((spans, last))
            case Anchor(at_start):
                self._anchored[first].append((at_start, last))
            case Sequence(parts):
                self._free[self._chain(first, parts)].append(last)
            case Choice(parts):
                for part in parts:
                    begin, end = self._fragment(part)
                    self._free[first].append(begin)
                    self._free[end].append(last)
            case Repeat(part, minimum, maximum):
                self._repeat(first, last, part, (minimum, maximum))
            case LookAhead():
                raise RegexError("a look-ahead is supported only directly after a leading ^")
        return first, last

    def _chain(self, at: int, parts: tuple[Node, ...]) -> int:
        for part in parts:
            begin, end = self._fragment(part)
            self._free[at].append(begin)
            at = end
        return at

    def _repeat(self, first: int, last: int, part: Node, bounds: tuple[int, int | None]) -> None:
        minimum, maximum = bounds
        at = self._chain(first, (part,) * minimum)
        if maximum is None:
            begin, end = self._fragment(part)
            loop = self._node()
            self._free[at].append(loop)
            self._free[loop] += [begin, last]
            self._free[end].append(loop)
            return
        for _ in range(maximum - minimum):
            self._free[at].append(last)
            at = self._chain(at, (part,))
        self._free[at].append(last)


def _merged(spans: list[Interval]) -> tuple[Interval, ...]:
    result: list[Interval] = []
    for low, high in sorted(spans):
        if result and low <= result[-1][1] + 1:
            result[-1] = (result[-1][0], max(high, result[-1][1]))
        else:
            result.append((low, high))
    return tuple(result)


def _without(spans: tuple[Interval, ...], removed: tuple[Interval, ...]) -> tuple[Interval, ...]:
    result: list[Interval] = []
    for low, high in spans:
        for first, last in removed:
            if last < low or first > high:
                continue
            if first > low:
                result.append((low, first - 1))
            low = last + 1
        if low <= high:
            result.append((low, high))
    return tuple(result)


@lru_cache(maxsize=64)
def _category(category: str) -> tuple[Interval, ...]:
    return _merged(
        [
            (code, code)
            for code in range(sys.maxunicode + 1)
            if unicodedata.category(chr(code)).startswith(category)
        ]
    )
