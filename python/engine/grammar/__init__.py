"""Constraints on what a model may write: from a request's field to the mask of a step.

a request's fields     parameters    -> `GrammarSpec`; only shapes are checked
`GrammarSpec`          sources       -> EBNF, by way of `schema/`; or a refusal
EBNF                   backend       -> a compiled grammar (`xgrammar_backend`)
  compiled where       compilers, compiler_child, frames
requests               constraints   held back until their grammar is there, cached
steps                  masks         what each row may sample, what its token means
all of it joined       setup
"""
