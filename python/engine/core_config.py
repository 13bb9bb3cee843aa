"""The settings that the Rust core takes, resolved: no "auto" is left here."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

import orjson


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    """Everything `Core` needs to know; mirrored by `rust/scheduler/src/config.rs`.

    `num_pages` counts page 0, which is reserved. `max_batch_tokens` is the token budget of a step
    and `max_chunk_tokens` the most that one prompt gets of it. `overlap_depth` is how many steps may
    be in flight when `plan` is called (0: plan, commit, plan, ...).
    """

    page_size: int = 16
    num_pages: int
    max_running_requests: int
    max_queued_requests: int | None = None
    max_queued_batch_requests: int | None = None
    max_batch_tokens: int = 2048
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
