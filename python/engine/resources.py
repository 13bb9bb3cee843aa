"""Settings left to the engine, worked out from the model and the machine: pure functions.

`launch.py` measures (memory, step times) and asks here; nothing here reads a clock, a device or a
file, except `free_host_bytes`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trunkline.engine.config import CacheOptions, SchedulerOptions
from trunkline.engine.models.config import DecoderConfig

GIB: Final = 1 << 30
# Without --mem-fraction-static the engines on a CPU take this share of what is free, and at most so
# much, together.
HOST_MEMORY_SHARE: Final = 0.4
HOST_POOL_LIMIT_BYTES: Final = 4 * GIB
# A pool's memory is not taken before it is needed where less than this would be left for others.
HOST_RESERVE_BYTES: Final = GIB // 2
DEVICE_MEMORY_SHARE: Final = 0.88
HOST_MAX_RUNNING: Final = 256
DEVICE_MAX_RUNNING: Final = 4096
# Without --cuda-graph-max-bs the largest captured decode step has so many rows.
LARGE_DEVICE_BYTES: Final = 80 * GIB
LARGE_DEVICE_GRAPH_ROWS: Final = 256
DEVICE_GRAPH_ROWS: Final = 160
# CUDA context, cuBLAS and attention workspaces, memory pool of the graphs.
DEVICE_RUNTIME_BYTES: Final = 1 * GIB
# What captured steps take besides their tensors and what attention keeps for them.
GRAPH_RUNTIME_BYTES: Final = 256 << 20
# Prompt positions whose log-probs a step computes at most: `MAX_PROMPT_SCORES` of
# `rust/scheduler/src/planner.rs`.
PROMPT_SCORES: Final = 512
# Best ids that are asked for at most at a position, and what a candidate for them takes; one tile
# of so many ids yields that many.
TOP_IDS: Final = 128
TOP_ID_BYTES: Final = 8
TOP_TILE: Final = 2048
# Of these ids of a sample, where top-k and top-p cut, a step keeps a list: id and scaled logit.
LISTED_CANDIDATES: Final = 8192
LISTED_BYTES: Final = 8
# The step budget that is derived from measured times stays in these bounds.
MIN_BUDGET_TOKENS: Final = 128
# With fewer rows weights are read from memory for too little use: prompts would take longer.
LEAST_PROMPT_TOKENS: Final = 32
MAX_BUDGET_TOKENS: Final = 8192
# Share of their remaining tokens that running requests are counted with at first.
FIRST_NEW_TOKEN_RATIO: Final = 0.7


class SettingError(ValueError):
    """A setting that this model or machine cannot have; the message says what it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory of the device that holds weights and KV pool, in bytes."""

    free: int  # for this engine, before weights and pool
    weights: int
    per_token: int  # KV of one token position
    on_host: bool
    num_engines: int = 1  # that share the device
    per_step: int = 0  # activations and logits of the largest step, and what the runtime takes


def weight_bytes(
    config: DecoderConfig, item_bytes: int, linear_item_bytes: int | None = None
) -> int:
    """Size of a decoder's weights; those of its layers' linears may have another size."""
    hidden = config.hidden_size
    heads = (config.num_heads + config.num_kv_heads) * config.head_dim
    others = config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2) + hidden
    linears = 0
    for layer in range(config.num_layers):
        linears += 2 * hidden * heads
        others += (4 if config.post_norms else 2) * hidden
        experts = config.experts_of(layer)
        if experts is None:
            linears += 3 * hidden * config.intermediate_size
        else:
            linears += experts.num_experts * hidden * 3 * experts.intermediate_size
            others += experts.num_experts * hidden
    return others * item_bytes + linears * (linear_item_bytes or item_bytes)


def device_step_bytes(
    config: DecoderConfig, item_bytes: int, num_tokens: int, num_rows: int, pages_per_row: int
) -> int:
    """Memory of a CUDA device beside weights and KV pool, for the largest step.

    Args:
        config: the model.
        item_bytes: of an activation.
        num_tokens: the step's.
        num_rows: samples that it draws.
        pages_per_row: entries of a row's page table.
    """
    rows = num_rows * (row_bytes(config) + 4 * pages_per_row) + score_bytes(config)
    return activation_bytes(config, item_bytes, num_tokens) + rows + DEVICE_RUNTIME_BYTES


def row_bytes(config: DecoderConfig) -> int:
    """What a sample takes in a step beside its tokens' activations.

    Its logits are there twice: penalties, bias and masks change a copy. With top-k and top-p there
    is a list of candidates.
    """
    candidates = min(config.vocab_size, LISTED_CANDIDATES) * LISTED_BYTES
    return 2 * 4 * config.vocab_size + candidates + _top_bytes(config)


def score_bytes(config: DecoderConfig) -> int:
    """What the log-probs of prompts take in a step."""
    return PROMPT_SCORES * (4 * config.vocab_size + _top_bytes(config))


def _top_bytes(config: DecoderConfig) -> int:
    tiles = -(-config.vocab_size // TOP_TILE)
    return min(tiles, TOP_IDS) * TOP_IDS * TOP_ID_BYTES


def graph_bytes(config: DecoderConfig, item_bytes: int, num_rows: int) -> int:
    """What captured decode steps take; the largest has `num_rows` rows, whose memory all share."""
    if num_rows == 0:
        return 0
    logits = 4 * config.vocab_size * num_rows
    candidates = min(config.vocab_size, LISTED_CANDIDATES) * LISTED_BYTES * num_rows
    steps = activation_bytes(config, item_bytes, num_rows) + logits + candidates
    return steps + GRAPH_RUNTIME_BYTES


def activation_bytes(config: DecoderConfig, item_bytes: int, num_tokens: int) -> int:
    """What a forward pass takes for so many tokens."""
    hidden, inner = config.hidden_size, config.intermediate_size
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    # The residual stream is float32; the widest moment is in attention, MLP or experts.
    widest = max(3 * inner + hidden, heads + config.num_heads * config.head_dim)
    if config.experts is not None:
        # What a token's experts are given at last, once more in fp8, and their results.
        width = 2 * config.experts.intermediate_size + hidden
        widest = max(widest, config.experts.top_k * width)
    return num_tokens * (2 * 4 * hidden + (hidden + widest) * item_bytes)


def graph_rows(requested: int | None, *, disabled: bool, device_bytes: int) -> int:
    """Rows of the largest decode step that is captured as a CUDA graph; 0: none is."""
    if disabled:
        return 0
    if requested is not None:
        return requested
    return LARGE_DEVICE_GRAPH_ROWS if device_bytes >= LARGE_DEVICE_BYTES else DEVICE_GRAPH_ROWS


def kv_token_bytes(config: DecoderConfig, item_bytes: int) -> int:
    """Size of the keys and values of one token position."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * item_bytes


def free_host_bytes() -> int:
    """Memory that this process may still take: what the machine and its control group leave."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if limit.exists() and used.exists() and (most := limit.read_text().strip()) != "max":
        free = min(free, int(most) - int(used.read_text()))
    return free


def context_length(requested: int | None, config: DecoderConfig) -> int:
    """The longest sequence, prompt and output together.

    Raises:
        SettingError: more is asked for than the model has positions.
    """
    if requested is None:
        return config.max_position
    if not 2 <= requested <= config.max_position:
        raise SettingError(
            f"context_length is {requested}, but must be 2 to {config.max_position} (the model's "
            "own); to go beyond, extend its rope through json_model_override_args"
        )
    return requested


def pool_tokens(options: CacheOptions, memory: Memory, context_len: int, max_running: int) -> int:
    """How many token positions the KV pool has: a whole number of pages.

    Raises:
        SettingError: not even one page is left, or an option is out of range or beyond the memory.
    """
    page = options.page_size
    if page < 1:
        raise SettingError(f"page_size is {page}, but must be at least 1")
    share = options.mem_fraction_static
    if share is not None and not 0 < share < 1:
        raise SettingError(f"mem_fraction_static is {share}, but must be above 0 and below 1")
    if options.max_total_tokens is not None:
        tokens = _whole_pages(options.max_total_tokens, page, "max_total_tokens")
        needed = tokens * memory.per_token
        left = memory.free - memory.weights - memory.per_step
        if needed > left:
            raise SettingError(
                f"max_total_tokens is {options.max_total_tokens}, whose KV pool takes "
                f"{needed / GIB:.1f} GiB, but beside weights and steps {left / GIB:.1f} GiB are "
                "free; "
                f"at most {max(left, 0) // memory.per_token} tokens fit"
            )
        return tokens
    limit = memory.free - memory.weights - memory.per_step
    if share is None:
        share = HOST_MEMORY_SHARE if memory.on_host else DEVICE_MEMORY_SHARE
        limit = HOST_POOL_LIMIT_BYTES // memory.num_engines if memory.on_host else limit
    pool_bytes = min(int(memory.free * share) - memory.weights, limit)
    if pool_bytes < page * memory.per_token:
        raise SettingError(
            f"no memory is left for the KV pool: {share:.2f} of the free {memory.free / GIB:.1f} "
            f"GiB, less {memory.weights / GIB:.1f} GiB of weights and {memory.per_step / GIB:.1f} "
            "GiB for steps; raise mem_fraction_static, lower max_running_requests or "
            "max_prefill_tokens, or free memory"
        )
    # More than every sequence at full length can use would lie idle.
    most = max_running * context_len
    return _whole_pages(min(pool_bytes // memory.per_token, most), page, "the KV pool")


def max_running_requests(options: SchedulerOptions, *, on_host: bool) -> int:
    """Most sequences in a step.

    Raises:
        SettingError: the option is out of range.
    """
    requested = options.max_running_requests
    if requested is None:
        return HOST_MAX_RUNNING if on_host else DEVICE_MAX_RUNNING
    if requested < 1:
        raise SettingError(f"max_running_requests is {requested}, but must be at least 1")
    return requested


def check_queue_order(options: SchedulerOptions) -> None:
    """Refuse an order of priorities where priorities mean nothing.

    Raises:
        SettingError: low values are to go first, but the policy is another than priority.
    """
    if options.schedule_low_priority_values_first and options.schedule_policy != "priority":
        raise SettingError(
            f"schedule_low_priority_values_first has no effect with schedule_policy "
            f"{options.schedule_policy!r}: set that to 'priority', or leave it out"
        )


def chunk_tokens(options: SchedulerOptions) -> int | None:
    """Most prompt tokens of one request per step; None: only the step's budget bounds them.

    Raises:
        SettingError: the option is out of range.
    """
    requested = options.chunked_prefill_size
    if requested is None or requested == -1:
        return None
    if requested < 1:
        raise SettingError(f"chunked_prefill_size is {requested}, but must be -1 or at least 1")
    return requested


@dataclass(frozen=True, slots=True)
class StepTime:
    """What a step takes by the number of its tokens."""

    fixed_s: float
    token_s: float  # above 0

    def tokens(self, target_s: float) -> int:
        """How many tokens make a step take `target_s`."""
        return int(max(target_s - self.fixed_s, 0.0) / self.token_s)


def step_time(times: Sequence[tuple[int, float]], target_s: float) -> StepTime:
    """What steps take that take about `target_s`.

    Args:
        times: measured `(tokens, seconds)` by growing tokens, one at least.
        target_s: where it is to be exact.
    """
    if len(times) == 1:
        width, elapsed = times[0]
        return StepTime(0.0, elapsed / width)
    reached = (index for index in range(1, len(times)) if times[index][1] >= target_s)
    later = next(reached, len(times) - 1)
    (earlier_width, earlier), (width, elapsed) = times[later - 1 : later + 1]
    # Tokens are never nearly free: such a measurement was disturbed.
    token_s = max((elapsed - earlier) / (width - earlier_width), elapsed / width / 2)
    return StepTime(max(elapsed - token_s * width, 0.0), token_s)


def step_budget(times: Sequence[tuple[int, float]], target_s: float) -> int:
    """The most tokens of a step that should take `target_s`; `times` are as in `step_time`."""
    tokens = step_time(times, target_s).tokens(target_s)
    return max(MIN_BUDGET_TOKENS, min(tokens, MAX_BUDGET_TOKENS))


def new_token_ratios(conservativeness: float) -> tuple[float, float]:
    """First and lowest share of their remaining tokens that running requests are counted with.

    Raises:
        SettingError: the option is out of range.
    """
    if not conservativeness > 0:
        raise SettingError(f"schedule_conservativeness is {conservativeness}, but must be above 0")
    first = min(FIRST_NEW_TOKEN_RATIO * conservativeness, 1.0)
    return first, 0.14 * first


def arena_bytes(max_running: int, budget: int, context_len: int) -> int:
    """Size of a plan's arena: a full step, and room for penalties, bias and stop ids."""
    return (4 << 20) + 4096 * max_running + 64 * budget + 16 * context_len


def _whole_pages(tokens: int, page: int, name: str) -> int:
    if tokens < page:
        raise SettingError(f"{name} has {tokens} tokens, but must hold a page of {page}")
    return tokens // page * page
