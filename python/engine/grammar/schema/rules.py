"""Grammar expressions and rules: dropping what derives no text, and printing EBNF for xgrammar."""

from collections.abc import Iterable
from dataclasses import dataclass

from trunkline.engine.grammar.schema.automaton import Interval


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Class:
    spans: tuple[Interval, ...]


@dataclass(frozen=True)
class Sequence:
    parts: "tuple[Expression, ...]"


@dataclass(frozen=True)
class Choice:
    """One of the parts; with no part, nothing at all can be written."""

    parts: "tuple[Expression, ...]"


@dataclass(frozen=True)
class Repeat:
    part: "Expression"
    minimum: int
    maximum: int | None


@dataclass(frozen=True)
class Rule:
    """A reference to a rule."""

    name: str


Expression = Text | Class | Sequence | Choice | Repeat | Rule
EMPTY = Text("")
IMPOSSIBLE = Choice(())
ROOT = "root"
_LAST = 0x10FFFF


def sequence(*parts: Expression) -> Expression:
    """The parts one after another."""
    flat: list[Expression] = []
    for part in parts:
        for piece in part.parts if isinstance(part, Sequence) else (part,):
            if piece == IMPOSSIBLE:
                return IMPOSSIBLE
            if isinstance(piece, Text) and flat and isinstance(flat[-1], Text):
                flat[-1] = Text(flat[-1].text + piece.text)
            elif piece != EMPTY:
                flat.append(piece)
    if not flat:
        return EMPTY
    return flat[0] if len(flat) == 1 else Sequence(tuple(flat))


def choice(parts: Iterable[Expression]) -> Expression:
    """One of the parts."""
    flat: dict[Expression, None] = {}
    for part in parts:
        flat.update(dict.fromkeys(part.parts if isinstance(part, Choice) else (part,)))
    return next(iter(flat)) if len(flat) == 1 else Choice(tuple(flat))


def optional(part: Expression) -> Expression:
    """The part, or nothing."""
    return EMPTY if part in (EMPTY, IMPOSSIBLE) else Repeat(part, 0, 1)


def repeat(part: Expression, minimum: int, maximum: int | None) -> Expression:
    """The part `minimum` to `maximum` times."""
    if maximum == 0 or part == EMPTY:
        return EMPTY
    if part == IMPOSSIBLE:
        return IMPOSSIBLE if minimum else EMPTY
    return part if minimum == maximum == 1 else Repeat(part, minimum, maximum)


def pruned(rules: dict[str, Expression]) -> dict[str, Expression]:
    """The rules that the root needs, without alternatives from which no text can be derived.

    Without a root in the result, the whole grammar derives no text.
    """
    productive: set[str] = set()
    users: dict[str, list[str]] = {}
    for name, expression in rules.items():
        for used in _references(expression):
            users.setdefault(used, []).append(name)
    pending = list(rules)
    while pending:
        name = pending.pop()
        if name not in productive and _derives(rules[name], productive):
            productive.add(name)
            pending.extend(users.get(name, ()))
    result: dict[str, Expression] = {}
    pending = [ROOT] if ROOT in productive else []
    while pending:
        name = pending.pop()
        if name not in result:
            result[name] = _without_dead(rules[name], productive)
            pending.extend(reversed(list(_references(result[name]))))
    return result


def printed(rules: dict[str, Expression]) -> str:
    """EBNF text, one rule a line, the root first."""
    return "".join(f"{name} ::= {_print(expression, 0)}\n" for name, expression in rules.items())


def _references(expression: Expression) -> Iterable[str]:
    match expression:
        case Rule(name):
            yield name
        case Sequence(parts) | Choice(parts):
            for part in parts:
                yield from _references(part)
        case Repeat(part, _, _):
            yield from _references(part)


def _derives(expression: Expression, productive: set[str]) -> bool:
    match expression:
        case Rule(name):
            return name in productive
        case Sequence(parts):
            return all(_derives(part, productive) for part in parts)
        case Choice(parts):
            return any(_derives(part, productive) for part in parts)
        case Repeat(part, minimum, _):
            return minimum == 0 or _derives(part, productive)
        case Class(spans):
            return bool(spans)
        case _:
            return True


def _without_dead(expression: Expression, productive: set[str]) -> Expression:
    if not _derives(expression, productive):
        return IMPOSSIBLE
    match expression:
        case Sequence(parts):
            return sequence(*(_without_dead(part, productive) for part in parts))
        case Choice(parts):
            alive = [part for part in parts if _derives(part, productive)]
            return choice(_without_dead(part, productive) for part in alive)
        case Repeat(part, minimum, maximum):
            return repeat(_without_dead(part, productive), minimum, maximum)
        case _:
            return expression


def _print(expression: Expression, level: int) -> str:
    """`level` 0: an alternative may stand bare; 1: inside a sequence; 2: before a quantifier."""
    match expression:
        case Text(text):
            return '"' + "".join(map(_escaped, text)) + '"'
        case Class(spans):
            return _printed_class(spans)
        case Rule(name):
            return name
        case Sequence(parts):
            text = " ".join(_print(part, 1) for part in parts)
            return f"({text})" if level > 1 else text
        case Choice(parts):
            text = " | ".join(_print(part, 1) for part in parts)
            return f"({text})" if level > 0 else text
        case Repeat(part, minimum, maximum):
            inner = _print(part, 2)
            text = inner + _quantifier(minimum, maximum)
            return f"({text})" if level > 1 else text


def _quantifier(minimum: int, maximum: int | None) -> str:
    simple = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((minimum, maximum))
    if simple is not None:
        return simple
    if minimum == maximum:
        return f"{{{minimum}}}"
    return f"{{{minimum},{'' if maximum is None else maximum}}}"


def _printed_class(spans: tuple[Interval, ...]) -> str:
    """A class; an open-ended one as what it excludes, which xgrammar handles much faster."""
    if not spans or spans[-1][1] != _LAST:
        return "[" + "".join(map(_printed_span, spans)) + "]"
    excluded: list[Interval] = []
    following = 0
    for first, last in spans:
        if following < first:
            excluded.append((following, first - 1))
        following = last + 1
    return "[^" + "".join(map(_printed_span, excluded)) + "]"


def _printed_span(span: Interval) -> str:
    first, last = span
    return (
        _escaped_code(first) if first == last else f"{_escaped_code(first)}-{_escaped_code(last)}"
    )


def _escaped(letter: str) -> str:
    if letter in '"\\':
        return "\\" + letter
    return letter if " " <= letter <= "~" else _escaped_code(ord(letter))


def _escaped_code(code: int) -> str:
    letter = chr(code)
    if letter.isascii() and letter.isalnum():
        return letter
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
