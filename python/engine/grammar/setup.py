"""From settings and a tokenizer to what joins grammars to a loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trunkline.engine.config import GrammarOptions
from trunkline.engine.grammar.backend import Backend, Vocabulary
from trunkline.engine.grammar.compiler_child import Setup
from trunkline.engine.grammar.compilers import CompilerProcess, CompilerThread
from trunkline.engine.grammar.constrained_runner import ConstrainedRunner, Runner
from trunkline.engine.grammar.constraints import (
    Constraints,
    GrammarCache,
    HoldingCore,
    NoConstraints,
)
from trunkline.engine.grammar.masks import MaskSource
from trunkline.engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    from trunkline.engine.loop import Executor


@dataclass(frozen=True, slots=True)
class Grammars:
    """A backend and its compiler, not yet joined to a loop."""

    options: GrammarOptions
    vocabulary: Vocabulary
    backend: Backend
    compiler: CompilerProcess | CompilerThread

    def wait_ready(self) -> None:
        """Return once grammars can be compiled.

        Raises:
            ValueError: the compiler does not start.
        """
        self.compiler.wait_ready()

    def join(
        self, core: HoldingCore, runner: Runner, wake: Callable[[], None], overlap_depth: int
    ) -> tuple[Constraints, ConstrainedRunner]:
        """What a loop prepares requests with, and what executes its steps.

        `wake` is called from another thread when a request can be released.
        """
        self.compiler.call_on_outcome(wake)
        cache = GrammarCache(self.options.grammar_cache_bytes)
        constraints = Constraints(core, self.compiler, cache)
        # Forced tokens void the sequence's next sample in flight; with two, the second would look
        # like one that is drawn after them.
        jump_forward = overlap_depth <= 1 and not self.options.disable_jump_forward
        masks = MaskSource(self.backend, constraints, self.vocabulary, jump_forward=jump_forward)
        return constraints, ConstrainedRunner(runner, masks)


@dataclass(frozen=True, slots=True)
class NoGrammars:
    """Grammars are refused, for a reason."""

    reason: str

    def wait_ready(self) -> None:
        """See `Grammars.wait_ready`."""

    def join(
        self, core: HoldingCore, runner: Executor, wake: Callable[[], None], overlap_depth: int
    ) -> tuple[NoConstraints, Executor]:
        """See `Grammars.join`."""
        return NoConstraints(core, self.reason), runner


def start_grammars(
    options: GrammarOptions,
    tokenizer: Tokenizer,
    vocab_size: int,
    end_ids: Sequence[int],
    *,
    own_process: bool,
) -> Grammars | NoGrammars:
    """Import the backend and start its compiler; `compiler.wait_ready` says when it has started.

    Args:
        options: the settings.
        tokenizer: the model's.
        vocab_size: ids of the model, which the tokenizer may have fewer of.
        end_ids: what ends a sequence.
        own_process: compile in a child process, else in a thread.
    """
    if options.grammar_backend == "none":
        return NoGrammars("this server was started with --grammar-backend none.")
    if not end_ids:
        return NoGrammars("the model has no end-of-sequence token with which it could end.")
    vocabulary = Vocabulary.of(tokenizer, vocab_size, end_ids)
    setup = Setup(
        vocabulary=vocabulary,
        time_limit_s=options.grammar_compile_timeout,
        max_compiled_bytes=options.grammar_cache_bytes // 4,
    )
    starting = CompilerProcess(setup) if own_process else CompilerThread(setup)
    from trunkline.engine.grammar.xgrammar_backend import XgrammarBackend  # while the child starts

    backend = XgrammarBackend(vocabulary)
    starting.use(backend)
    return Grammars(options, vocabulary, backend, starting)
