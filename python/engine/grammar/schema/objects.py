"""The grammar of objects: members in schema order, then other keys, with correct commas."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trunkline.engine.grammar.schema.automaton import (
    Automaton,
    complement,
    intersection,
    union,
    words,
)
from trunkline.engine.grammar.schema.document import SchemaError
from trunkline.engine.grammar.schema.regex import regex_automaton
from trunkline.engine.grammar.schema.rules import (
    EMPTY,
    IMPOSSIBLE,
    Expression,
    Rule,
    Text,
    choice,
    optional,
    repeat,
    sequence,
)
from trunkline.engine.grammar.schema.shapes import (
    ANYTHING,
    NOTHING,
    Exists,
    Literals,
    Objects,
    Strings,
    both,
)
from trunkline.engine.grammar.schema.texts import string_automaton
from trunkline.engine.grammar.schema.words import bracketed, json_text

if TYPE_CHECKING:
    from trunkline.engine.grammar.schema.values import ValueWriter

MAX_KEY_CLASSES = 64
MAX_LISTED_KEYS = 64


@dataclass(frozen=True)
class _Member:
    """A member of a known name, or (not `name`) of any of the `keys`."""

    name: str
    keys: Automaton | None
    values: Literals
    required: bool
    proves: frozenset[Exists]


class ObjectWriter:
    """Writes the rules of one object shape.

    Raises:
        SchemaError: `minProperties` asks for distinct keys of an unlimited set.
    """

    def __init__(self, values: "ValueWriter", shape: Objects, path: str) -> None:
        self._values = values
        self._shape = shape
        self._path = path
        self._space = values.space
        self._keys = self._key_automaton()
        self._states: dict[tuple[int, int, frozenset[Exists]], Expression] = {}

    def expression(self) -> Expression:
        """The whole object."""
        shape = self._shape
        named, others = self._members()
        required = sum(member.required for member in named)
        if any(member.required and member.values == NOTHING for member in named):
            return IMPOSSIBLE
        named = [member for member in named if member.values != NOTHING]
        self._named, self._others = named, others
        maximum = shape.maximum
        if maximum is not None and not others and maximum >= len(named):
            maximum = None
        if others and shape.minimum > required + 1:
            raise SchemaError(
                self._path,
                "minProperties",
                f"is {shape.minimum}: it is enforced up to one more than `required` names, "
                "unless `properties` and `additionalProperties: false`, or `propertyNames`, "
                "list all keys",
            )
        if maximum is None and shape.minimum <= required and not shape.exists:
            content = self._plain()
            possible_empty = not required
        else:
            self._maximum = maximum
            content = self._counted(0, 0, frozenset())
            possible_empty = False
            if not required and not shape.minimum and not shape.exists:
                possible_empty = True
        return bracketed("{", content, "}", self._space, possible_empty)

    def _key_automaton(self) -> Automaton | None:
        if self._shape.keys == ANYTHING:
            return None
        return self._values.key_automaton(self._shape.keys)

    def _members(self) -> tuple[list[_Member], list[_Member]]:
        """The members of known names in their order, and those of other keys."""
        shape = self._shape
        known = dict(shape.names)
        mentioned = set(known) | shape.required
        mentioned.update(
            *(rest.names for rest in shape.rests), *(one.names for one in shape.exists)
        )
        order = [name for name in dict.fromkeys(shape.order) if name in mentioned]
        order += sorted(mentioned - set(order))
        named = [self._named_member(name, known.get(name, ANYTHING)) for name in order]
        others: list[_Member] = []
        if self._is_closed(len(order)):
            return named, others
        for member in self._other_members(order):
            assert member.keys is not None, "other members have a set of keys"
            listed = member.keys.strings(MAX_LISTED_KEYS)
            if listed is None:
                others.append(member)
            else:
                named += [
                    _Member(name, None, member.values, False, member.proves) for name in listed
                ]
        return named, others

    def _is_closed(self, names: int) -> bool:
        shape = self._shape
        spoken = shape.rests or shape.patterns or shape.exists or shape.keys != ANYTHING
        return self._values.closed and bool(shape.names) and not spoken and shape.minimum <= names

    def _named_member(self, name: str, values: Literals) -> _Member:
        shape = self._shape
        for pattern, condition in sorted(shape.patterns, key=_first):
            if regex_automaton(pattern).accepts(name):
                values = both(values, condition)
        for rest in shape.rests:
            if name not in rest.names and not _matches(rest.patterns, name):
                values = both(values, rest.values)
        if self._keys is not None and not self._keys.accepts(name):
            values = NOTHING
        proves = frozenset(one for one in shape.exists if self._proves(one, name))
        return _Member(name, None, values, name in shape.required, proves)

    def _proves(self, one: Exists, name: str) -> bool:
        return (
            name not in one.names
            and not _matches(one.without, name)
            and (one.pattern is None or regex_automaton(one.pattern).accepts(name))
            and (one.key == ANYTHING or self._values.key_automaton(one.key).accepts(name))
        )

    def _other_members(self, names: list[str]) -> list[_Member]:
        """Keys without a name here, divided by which conditions concern them."""
        start = [] if self._keys is None else [self._keys]
        free = intersection([*start, complement(words(names))])
        classes: list[tuple[Automaton, frozenset[int]]] = [(free, frozenset())]
        tests = [regex_automaton(pattern) for pattern in self._patterns()]
        tests += [
            self._values.key_automaton(one.key) for one in self._exists() if one.key != ANYTHING
        ]
        for number, test in enumerate(tests):
            classes = [
                (part, signs | {number} if inside else signs)
                for keys, signs in classes
                for inside, part in (
                    (True, intersection([keys, test])),
                    (False, intersection([keys, complement(test)])),
                )
                if not part.is_empty()
            ]
            if len(classes) > MAX_KEY_CLASSES:
                message = f"divides keys into more than {MAX_KEY_CLASSES} kinds"
                raise SchemaError(self._path, "patternProperties", message)
        found: dict[tuple[Literals, frozenset[Exists]], Automaton] = {}
        for keys, _ in classes:
            if keys.is_empty():
                continue
            member = self._class_member(keys)
            if member.values != NOTHING:
                key = (member.values, member.proves)
                found[key] = union([found[key], keys]) if key in found else keys
        return [
            _Member("", keys, values, False, proves) for (values, proves), keys in found.items()
        ]

    def _patterns(self) -> list[str]:
        shape = self._shape
        found = {pattern for pattern, _ in shape.patterns}
        for rest in shape.rests:
            found |= rest.patterns
        for one in shape.exists:
            found |= one.without | ({one.pattern} if one.pattern is not None else set())
        return sorted(found)

    def _exists(self) -> list[Exists]:
        return sorted(self._shape.exists, key=repr)

    def _class_member(self, keys: Automaton) -> _Member:
        """The conditions on a class of keys are those on any one of its keys."""
        return self._named_member(_example(keys), ANYTHING)

    def _pair(self, member: _Member) -> Expression:
        key: Expression
        if member.keys is None:
            key = Text(json_text(member.name))
        elif member.keys == complement(words([])):
            key = Rule("string")
        else:
            key = self._values.printer.quoted(member.keys)
        colon = sequence(Text(":"), self._space.after_colon)
        pair = sequence(key, colon, self._values.value(member.values))
        return self._values.rule("p", pair)

    def _comma(self) -> Expression:
        return sequence(Text(","), self._space.after_comma)

    def _plain(self) -> Expression:
        """At least one member, where nothing needs to be counted."""
        named = self._named
        other = self._values.rule("m", choice(self._pair(member) for member in self._others))
        loop = repeat(sequence(self._comma(), other), 0, None)
        pairs = [self._pair(member) for member in named]
        tails: list[Expression] = [loop] * (len(named) + 1)
        leading = next((place for place, member in enumerate(named) if member.required), len(named))
        for place in reversed(range(len(named))):
            part = sequence(self._comma(), pairs[place])
            tail = sequence(part if named[place].required else optional(part), tails[place + 1])
            tails[place] = self._values.rule("t", tail) if place <= leading else tail
        starts = [
            sequence(pairs[place], tails[place + 1])
            for place in range(min(leading + 1, len(named)))
        ]
        if leading == len(named):
            starts.append(sequence(other, loop))
        return choice(starts)

    def _counted(self, index: int, count: int, proven: frozenset[Exists]) -> Expression:
        """The members from `index` on, after `count` members."""
        key = (index, count, proven)
        known = self._states.get(key)
        if known is not None:
            return known
        shape, named = self._shape, self._named
        rule = self._states[key] = self._values.new_rule("c")
        parts: list[Expression] = []
        candidates = [named[index]] if index < len(named) else self._others
        cap = max(shape.minimum, 1) if self._maximum is None else self._maximum
        if self._maximum is None or count < self._maximum:
            for member in candidates:
                after = self._counted(
                    min(index + 1, len(named)), min(count + 1, cap), proven | member.proves
                )
                comma = self._comma() if count else EMPTY
                parts.append(sequence(comma, self._pair(member), after))
        if index < len(named):
            if not named[index].required:
                parts.append(self._counted(index + 1, count, proven))
        elif count and count >= shape.minimum and proven == shape.exists:
            parts.append(EMPTY)
        self._values.define(rule, choice(parts))
        return rule


def _first(item: tuple[str, Literals]) -> str:
    return item[0]


def _matches(patterns: frozenset[str], name: str) -> bool:
    return any(regex_automaton(pattern).accepts(name) for pattern in patterns)


def _example(keys: Automaton) -> str:
    """The shortest text of a language that is not empty."""
    pending: list[tuple[int, str]] = [(0, "")]
    seen = {0}
    for state, text in pending:
        if state in keys.accepting:
            return text
        for target, spans in sorted(keys.edges(state).items()):
            if target not in seen:
                seen.add(target)
                pending.append((target, text + chr(spans[0][0])))
    raise AssertionError("the language is empty")


def key_language(strings: "list[Strings]") -> Automaton:
    """The keys that any of the string shapes allows."""
    if not strings:
        return words([])
    return union([string_automaton(shape) for shape in strings])
