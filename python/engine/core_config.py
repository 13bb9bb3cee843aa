"""The settings that the Rust core takes, resolved: no "auto" is left here."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

import orjson


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedSteps:
    """How long steps may take in which some sequences decode and others compute prompts.

    The scheduler measures such steps from commit to commit. What they take is a multiple of the
    first estimate, `fixed_s + token_s * tokens`; that multiple is followed, slowly enough that no
    single step changes much (`rust/scheduler/src/pace.rs`), and the next one gets as many tokens
    as make it take the target.

    Attributes:
        target_s: seconds that such a step is to take.
        fixed_s: seconds of a step without tokens, by the first estimate.
        token_s: what every token adds.
        least_prompt_tokens: prompts get so many tokens of a step however long it takes, or an
            eighth of `max_batch_tokens` if that is less.
    """

    target_s: float
    fixed_s: float
    token_s: float
    least_prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    """Everything `Core` needs to know; mirrored by `rust/scheduler/src/config.rs`.

    Attributes:
        page_size: tokens per page of KV.
        num_pages: pages of the pool, with page 0, which is reserved.
        max_running_requests: rows of the device's tables. At most `max_batch_tokens` less one token
            in eight sequences run, so that every one gets its next token and prompts get the rest.
        max_queued_requests: interactive requests that may wait; further ones are refused (503).
        max_queued_batch_requests: the same for requests of class 1.
        max_batch_tokens: token budget of a step.
        mixed_steps: how long steps may take in which sequences decode; None: as long as others.
        max_chunk_tokens: the most that one prompt gets of it; None: all that is left.
        max_context_len: tokens of a sequence, prompt and output.
        eos_token_ids: ids that end a sequence unless it ignores them.
        policy: order of waiting requests of equal priority: fcfs (arrival) or lpm (longest cached
            prefix first; fcfs without `prefix_cache`).
        priority_scheduling: order by priority, higher first; otherwise priorities mean nothing.
        low_priority_first: lower numbers first.
        aging_steps: steps after which a passed-over request or prompt gets its turn whatever its
            rank; the bounds are in `rust/scheduler/src/queue.rs` and `planner.rs`.
        prefix_cache: keep KV of earlier sequences, and share it.
        overlap_depth: steps that may be in flight when `plan` is called (0: plan, commit, ...).
        waiting_timeout_s: after this a request of which nothing has run is refused (503).
        new_token_ratio_init: share of a sequence's remaining tokens for which admission reserves
            memory; falls to `new_token_ratio_min` over `new_token_ratio_decay_steps` steps.
        max_samples: the largest `n` of a request.
        arena_bytes: size of every arena given to `plan`.
        tokenizer_json: contents of tokenizer.json; None: no text, only ids, and no stops by text.
    """

    page_size: int = 16
    num_pages: int
    max_running_requests: int
    max_queued_requests: int | None = None
    max_queued_batch_requests: int | None = None
    max_batch_tokens: int = 2048
    mixed_steps: MixedSteps | None = None
    max_chunk_tokens: int | None = None
    max_context_len: int
    vocab_size: int
    eos_token_ids: list[int] = field(default_factory=list)
    policy: str = "fcfs"  # fcfs, lpm
    priority_scheduling: bool = False
    low_priority_first: bool = False
    aging_steps: int = 256
    prefix_cache: bool = True
    overlap_depth: int = 0
    waiting_timeout_s: float | None = None
    new_token_ratio_init: float = 0.7
    new_token_ratio_min: float = 0.1
    new_token_ratio_decay_steps: int = 600
    max_samples: int = 128
    arena_bytes: int = 4 << 20
    tokenizer_json: str | None = None

    def to_json(self) -> bytes:
        """Serialise for `Core`."""
        return orjson.dumps(asdict(self))
