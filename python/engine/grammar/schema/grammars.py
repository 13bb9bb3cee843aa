"""From a schema or an expression to the text of its grammar, with nothing loosened silently.

`schema_grammar` returns EBNF whose texts are exactly the values that a schema allows, in one
canonical serialisation (below), or raises `SchemaError` naming the path and the keyword that it
cannot enforce. It is pure and deterministic, and bounded by `Limits`.

Canonical serialisation: members stand in the order of `properties`, then names that only `required`
or other keywords mention, then other keys; scalars are spelt as `words` says; numbers have
at most 64 digits before and after the point, and integers no point; blanks are what `whitespace`
allows:

* `flexible`: after `{ [ ,` and before `} ]` nothing, a space, or a newline with at most 24 spaces
  or 8 tabs; after `:` nothing or a space.
* `spaced`: `, ` and `: `, as `json.dumps` writes.
* `compact`: no blanks.
"""

from trunkline.engine.grammar.schema.automaton import TooLarge
from trunkline.engine.grammar.schema.cases import Alternatives
from trunkline.engine.grammar.schema.document import Document, Limits, SchemaError
from trunkline.engine.grammar.schema.regex import RegexError, regex_automaton
from trunkline.engine.grammar.schema.rules import ROOT, Expression, printed, pruned
from trunkline.engine.grammar.schema.shapes import literal
from trunkline.engine.grammar.schema.values import ValueWriter
from trunkline.engine.grammar.schema.words import AutomatonPrinter


def schema_grammar(
    schema: object,
    *,
    limits: Limits | None = None,
    whitespace: str = "flexible",
    assert_formats: bool = True,
    closed: bool = False,
) -> str:
    """EBNF for the values that a parsed JSON Schema allows; the first rule is `root`.

    Args:
        schema: The schema as `json.loads` gives it.
        limits: Bounds on cost.
        whitespace: `flexible`, `spaced` or `compact`.
        closed: Whether objects that list `properties` and arrays that list `prefixItems`, but do
            not speak of what else they hold, hold nothing else. Never looser, much cheaper to
            compile, and what models do best with. Ignored where it would leave no value at all.
        assert_formats: Whether `format` is enforced (unknown ones refused) or an annotation.

    Raises:
        SchemaError: The schema is malformed, not enforceable, unsatisfiable or too large.
        ValueError: There is no such whitespace mode.
    """
    limits = limits or Limits()
    document = Document(schema, limits)
    alternatives = Alternatives(document, limits, assert_formats)
    try:
        rules = pruned(ValueWriter(alternatives, whitespace, closed).write(literal(document.root)))
    except RecursionError:
        raise SchemaError(
            "#", "", "the schema is too deep or counts too far; simplify it"
        ) from None
    if ROOT not in rules and closed:
        return schema_grammar(
            schema, limits=limits, whitespace=whitespace, assert_formats=assert_formats
        )
    if ROOT not in rules:
        raise SchemaError("#", "", "no value satisfies this schema")
    return _bounded(rules, limits)


def regex_grammar(pattern: str, *, limits: Limits | None = None) -> str:
    """EBNF for the texts that a regular expression matches as a whole.

    Raises:
        RegexError: The expression is malformed, not supported, too large, or matches no text.
    """
    limits = limits or Limits()
    try:
        automaton = regex_automaton(pattern, whole=True)
    except TooLarge:
        raise RegexError(f"{pattern!r} needs too many states; simplify it") from None
    if automaton.is_empty():
        raise RegexError(f"{pattern!r} matches no text")
    rules: dict[str, Expression] = {}
    rules[ROOT] = AutomatonPrinter(rules).text(automaton)
    try:
        return _bounded(pruned(rules), limits)
    except SchemaError as error:
        raise RegexError(error.message) from None


def _bounded(rules: dict[str, Expression], limits: Limits) -> str:
    text = printed(rules)
    if len(text) > limits.grammar_bytes:
        message = (
            f"the grammar has {len(text)} bytes, the limit is {limits.grammar_bytes}; simplify it"
        )
        raise SchemaError("#", "", message)
    return text
