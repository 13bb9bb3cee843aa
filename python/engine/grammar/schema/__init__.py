"""JSON Schema and regular expressions as EBNF, exactly; pure: no engine, no xgrammar, no clock.

The way of a schema, and the files in the order in which it meets them:

    schema                        JSON, as parsed
      |  document                 nodes: identities, anchors, references, limits
    conditions on nodes
      |  cases                    keywords that combine schemas; which keywords there are
      |    scalars, containers    keywords about one value; about items and members
      |    unevaluated            what the other keywords have looked at
      |    emptiness              proofs that alternatives are disjoint
    alternatives of shapes
      |  shapes                   what a value of one type must be, as data
      |  values                   a rule for each condition
      |    objects, arrays        members with their commas; items
      |    texts                  strings and numbers: their languages
    rules
      |  rules                    dropping what derives no text, printing
    EBNF                          grammars: the two functions that others call

Below them: `automaton` (languages of strings, keys and numbers), `regex`, `numbers` and `formats`,
which make automata, and `words`, the spelling of scalars and the printing of automata.
"""

from trunkline.engine.grammar.schema.document import Limits, SchemaError
from trunkline.engine.grammar.schema.grammars import regex_grammar, schema_grammar
from trunkline.engine.grammar.schema.regex import RegexError

__all__ = ["Limits", "RegexError", "SchemaError", "regex_grammar", "schema_grammar"]
