"""From settings and a checkpoint to an engine that can run: runner, core, facts.

The one place that knows the Rust core's constructor, the runner's and the checkpoint's; what the
user left open is worked out here, by the functions of `resources.py`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
import numpy as np
import torch

from trunkline._core import Core
from trunkline.engine import env_vars, pool_memory, resources
from trunkline.engine.channel import Port
from trunkline.engine.checkpoint import Checkpoint
from trunkline.engine.config import EngineConfig, flat_settings
from trunkline.engine.core_config import CoreConfig, MixedSteps
from trunkline.engine.grammar.setup import Grammars, NoGrammars, start_grammars
from trunkline.engine.ineffective import Surroundings, without_effect
from trunkline.engine.loop import EngineLoop, Entered, LoopOptions
from trunkline.engine.messages import EngineFacts, SamplingParams, Submit
from trunkline.engine.resources import SettingError
from trunkline.engine.runner import Runner
from trunkline.engine.shares import Share
from trunkline.engine.sizes import Sizes, available, sizes_of
from trunkline.engine.step_times import TimedExecutor
from trunkline.engine.trial import Trial, measure, measured_memory
from trunkline.engine.weights import is_model_from_hub, is_tokenizer_from_hub, open_checkpoint
from trunkline.kernels import OptionError
from trunkline.plan import Plan

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Group = TypeVar("Group", bound="DataclassInstance")

# Step widths that are timed; no wider one is tried once a step takes longer than the target.
MEASURED_WIDTHS: Final = (16, 64, 256, 1024)
MEASURED_RUNS: Final = 3  # the best counts: what else runs on the machine only slows steps down
MEASURE_LIMIT_S: Final = 3.0  # no further width is tried after that
# The KV pool's memory is taken for so long before requests come; what is left, beside them.
POOL_WAIT_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedEngine:
    """An engine that is ready to run in whichever thread calls its loop."""

    core: Core
    runner: Runner
    core_config: CoreConfig
    facts: EngineFacts
    grammars: Grammars | NoGrammars
    log_interval_steps: int
    logger: logging.Logger

    def loop(
        self, port: Port, beat: Callable[[], None], entered: Entered | None = None
    ) -> EngineLoop:
        """Join it to a port; `beat` and `entered` are as in `LoopOptions`."""
        facts = msgspec.to_builtins(self.facts)
        depth = self.core_config.overlap_depth
        preparer, runner = self.grammars.join(self.core, self.runner, port.wake, depth)
        options = LoopOptions(
            arena_bytes=self.core_config.arena_bytes,
            overlap_depth=depth,
            log_interval_steps=self.log_interval_steps,
            max_total_tokens=self.facts.max_total_tokens,
            beat=beat,
            entered=entered,
            preparer=preparer,
            logger=self.logger,
            verbs={"server_info": lambda _: {**facts, "stats": dict(self.core.stats())}},
        )
        times = env_vars.step_times_file()
        executor = TimedExecutor(runner, times) if times else runner
        return EngineLoop(self.core, executor, port, options)


def engine_config(settings: Mapping[str, object]) -> EngineConfig:
    """Compose a config from flat settings, as `Engine(**settings)` takes them.

    Raises:
        TypeError: a name is unknown.
        SettingError: a value is not among a setting's choices, or below its minimum.
    """
    left = dict(settings)
    defaults = EngineConfig()
    groups = {
        field.name: _take(getattr(defaults, field.name), left)
        for field in fields(EngineConfig)
        if is_dataclass(getattr(defaults, field.name))
    }
    config = _take(replace(defaults, **groups), left)
    if left:
        raise TypeError(f"unknown engine settings: {', '.join(sorted(left))}")
    return config


def check_is_single(config: EngineConfig) -> None:
    """Refuse settings of several engines where there can be only one.

    Raises:
        SettingError: there is to be more than one, or one to be chosen.
    """
    if config.parallel.dp_size != 1:
        raise SettingError(
            f"dp_size is {config.parallel.dp_size}, but an Engine in your process is one engine: "
            "make several, or use engine-serve --dp-size"
        )
    if config.parallel.load_balance_method != "auto":
        raise SettingError(
            f"load_balance_method is {config.parallel.load_balance_method!r}, but an Engine in "
            "your process has nothing to choose from; leave it out"
        )


def build(
    config: EngineConfig,
    checkpoint: Checkpoint | None = None,
    logger: logging.Logger | None = None,
    *,
    own_process: bool = False,
    share: Share = Share(),  # noqa: B008 (it is frozen)
) -> LaunchedEngine:
    """Load the model and make an engine of it.

    Args:
        config: the settings.
        checkpoint: the opened model, when the caller has it already.
        logger: where this engine logs; None: this module's.
        own_process: this process is the engine's alone; it may have a child that compiles grammars.
        share: which of several engines this is, and what it may take.

    Raises:
        CheckpointError: the model cannot be loaded.
        SettingError: a setting is out of range, or does not fit model and machine.
    """
    started_at = time.monotonic()
    logger = logger or logging.getLogger(__name__)
    checkpoint = checkpoint or open_checkpoint(config.model)
    sizes = sizes_of(config, checkpoint, share)
    grammars = start_grammars(
        config.grammar,
        checkpoint.tokenizer,
        checkpoint.config.vocab_size,
        _end_ids(checkpoint),
        own_process=own_process,
    )
    logger.info("Load weight begin. model=%s, avail mem=%s", checkpoint.source, available(sizes))
    try:
        runner = Runner(checkpoint, sizes.trial_options())
    except OptionError as error:
        raise SettingError(str(error)) from error
    if sizes.trial is not None:
        sizes = _sizes_by_trial(runner, sizes, sizes.trial, config, logger)
        runner.resize(sizes.runner)
    logger.info(
        "Load weight end. type=%s, dtype=torch.%s, quantization=%s, avail mem=%s, elapsed=%.1f s",
        checkpoint.config.architecture,
        runner.options.dtype,
        runner.options.computation.quantization,
        available(sizes),
        time.monotonic() - started_at,
    )
    _step_time(runner, _widths(sizes)[0])  # backends prepare much in their first step
    core_config = replace(
        _core_config(config, checkpoint, sizes, _budget(runner, sizes, config, logger)),
        overlap_depth=0 if config.scheduler.disable_overlap_schedule else runner.overlap_depth,
    )
    core = Core(core_config.to_json())
    taking = pool_memory.take_ahead(runner.population(), logger)
    grammars.wait_ready()
    if taking is not None:
        taking.join(POOL_WAIT_S)
    facts = msgspec.structs.replace(
        _facts(config, checkpoint, core_config, runner),
        # The budget may leave room for fewer than the settings allow.
        max_running_requests=int(core.stats()["max_running"]),
        startup_s=time.monotonic() - started_at,
    )
    _log_facts(facts, available(sizes), logger)
    if share.rank == 0:  # the others have the same
        there = _surroundings(config, facts, runner, grammars, supervised=own_process)
        for line in without_effect(config, there):
            logger.warning("%s", line)
    return LaunchedEngine(
        core=core,
        runner=runner,
        core_config=core_config,
        facts=facts,
        grammars=grammars,
        log_interval_steps=config.scheduler.decode_log_interval,
        logger=logger,
    )


def _sizes_by_trial(
    runner: Runner, sizes: Sizes, trial: Trial, config: EngineConfig, logger: logging.Logger
) -> Sizes:
    """Sizes for the memory that the largest step was seen to take."""
    device = torch.device(sizes.runner.device)
    sampling = SamplingParams(
        max_new_tokens=1, ignore_eos=True, top_p=0.9, logit_bias=[(0, -1.0)], seed=1
    )
    widths = [trial.width] * trial.num_rows
    taken = measure(
        device,
        sizes.memory.free,
        runner.memory.pool_bytes,
        lambda: _longest_step(runner, widths, sampling),
    )
    captured = min(sizes.runner.computation.max_graph_batch, sizes.runner.max_running_requests)
    graphs = resources.graph_bytes(runner.config, runner.dtype.itemsize, captured)
    graphs += runner.captured_bytes(captured)
    memory = measured_memory(
        taken, trial, sizes.memory, runner.config, sizes.runner.max_running_requests, graphs
    )
    logger.info(
        "Memory: weights %.2f GB, a step of %d rows of %d tokens %.2f GB, outside of torch "
        "%.2f GB; kept for steps and graphs %.2f GB (estimate: %.2f GB)",
        taken.weights / resources.GIB,
        trial.num_rows,
        trial.width,
        taken.step / resources.GIB,
        taken.other / resources.GIB,
        memory.per_step / resources.GIB,
        sizes.memory.per_step / resources.GIB,
    )
    return sizes.with_memory(memory, config.cache)


def _surroundings(
    config: EngineConfig,
    facts: EngineFacts,
    runner: Runner,
    grammars: Grammars | NoGrammars,
    *,
    supervised: bool,
) -> Surroundings:
    return Surroundings(
        device=torch.device(runner.options.device),
        backend=runner.options.backend,
        overlap_depth=runner.overlap_depth,
        max_batch_tokens=facts.max_batch_tokens,
        max_running_requests=facts.max_running_requests,
        no_grammars=grammars.reason if isinstance(grammars, NoGrammars) else None,
        model_from_hub=is_model_from_hub(config.model),
        tokenizer_from_hub=is_tokenizer_from_hub(config.model),
        supervised=supervised,
    )


def _end_ids(checkpoint: Checkpoint) -> list[int]:
    """What ends a sequence; ids beyond the model's vocabulary never come."""
    vocab_size = checkpoint.config.vocab_size
    return [one for one in checkpoint.generation.eos_token_ids if one < vocab_size]


def _core_config(
    config: EngineConfig, checkpoint: Checkpoint, sizes: Sizes, budget: _Budget
) -> CoreConfig:
    scheduler, runner = config.scheduler, sizes.runner
    ratio_init, ratio_min = resources.new_token_ratios(scheduler.schedule_conservativeness)
    by_priority = scheduler.schedule_policy == "priority"
    return CoreConfig(
        page_size=runner.page_size,
        num_pages=runner.num_pages,
        max_running_requests=runner.max_running_requests,
        max_queued_requests=scheduler.max_queued_requests,
        max_batch_tokens=budget.tokens,
        mixed_steps=budget.mixed_steps,
        max_chunk_tokens=resources.chunk_tokens(scheduler),
        max_context_len=runner.max_context_len,
        vocab_size=checkpoint.config.vocab_size,
        eos_token_ids=_end_ids(checkpoint),
        policy="fcfs" if by_priority else scheduler.schedule_policy,
        priority_scheduling=by_priority,
        low_priority_first=scheduler.schedule_low_priority_values_first,
        prefix_cache=not config.cache.disable_radix_cache,
        waiting_timeout_s=scheduler.waiting_timeout_s,
        new_token_ratio_init=ratio_init,
        new_token_ratio_min=ratio_min,
        arena_bytes=resources.arena_bytes(
            runner.max_running_requests, budget.tokens, runner.max_context_len
        ),
        tokenizer_json=checkpoint.tokenizer.to_json(),
    )


def _facts(
    config: EngineConfig, checkpoint: Checkpoint, core: CoreConfig, runner: Runner
) -> EngineFacts:
    memory = runner.memory
    return EngineFacts(
        pid=os.getpid(),
        model_path=checkpoint.source,
        dtype=runner.options.dtype,
        device=runner.options.device,
        weight_version=config.model.weight_version,
        vocab_size=core.vocab_size,
        page_size=core.page_size,
        context_length=core.max_context_len,
        max_total_tokens=(core.num_pages - 1) * core.page_size,
        max_running_requests=core.max_running_requests,
        max_batch_tokens=core.max_batch_tokens,
        chunked_prefill_size=core.max_chunk_tokens,
        weight_bytes=memory.weight_bytes,
        kv_cache_bytes=memory.pool_bytes,
        eos_token_ids=core.eos_token_ids,
        settings=flat_settings(config),
        startup_s=0.0,
    )


def _log_facts(facts: EngineFacts, free: str, logger: logging.Logger) -> None:
    logger.info(
        "max_total_num_tokens=%d, chunked_prefill_size=%d, max_prefill_tokens=%d, "
        "max_running_requests=%d, context_len=%d, available_%s_mem=%s",
        facts.max_total_tokens,
        facts.chunked_prefill_size or facts.max_batch_tokens,
        facts.max_batch_tokens,
        facts.max_running_requests,
        facts.context_length,
        facts.device.partition(":")[0],
        free,
    )


@dataclass(frozen=True, slots=True)
class _Budget:
    """Most tokens of a step, and how long one may take in which sequences decode (None: any)."""

    tokens: int
    mixed_steps: MixedSteps | None


def _budget(runner: Runner, sizes: Sizes, config: EngineConfig, logger: logging.Logger) -> _Budget:
    """What the settings say, or what meets the target step times on this machine."""
    if config.scheduler.max_prefill_tokens is not None:
        return _Budget(config.scheduler.max_prefill_tokens, None)
    target_s = config.scheduler.target_step_ms / 1000
    times: list[tuple[int, float]] = []
    give_up_at = time.monotonic() + MEASURE_LIMIT_S
    for width in _widths(sizes):
        best = _step_time(runner, width)
        for _ in range(MEASURED_RUNS - 1):
            if time.monotonic() < give_up_at:
                best = min(best, _step_time(runner, width))
        times.append((width, best))
        if best > target_s or time.monotonic() > give_up_at:
            break
    mixed_target_s = config.scheduler.target_mixed_step_ms / 1000
    tokens = resources.step_budget(times, target_s)
    mixed = resources.step_time(times, mixed_target_s)
    logger.info(
        "Step times: %s; budget for %.0f ms: %d tokens, for %.0f ms while others decode: %d at "
        "first",
        ", ".join(f"{width} tokens {1000 * elapsed:.1f} ms" for width, elapsed in times),
        config.scheduler.target_step_ms,
        tokens,
        config.scheduler.target_mixed_step_ms,
        min(mixed.tokens(mixed_target_s), tokens),
    )
    mixed_steps = MixedSteps(
        target_s=mixed_target_s,
        fixed_s=mixed.fixed_s,
        token_s=mixed.token_s,
        least_prompt_tokens=resources.LEAST_PROMPT_TOKENS,
    )
    return _Budget(tokens, mixed_steps)


def _widths(sizes: Sizes) -> list[int]:
    """Widths of steps that pool and context have room for."""
    most = min(sizes.pool_tokens, sizes.runner.max_context_len - 1)
    return [width for width in MEASURED_WIDTHS if width <= most] or [most]


def _step_time(runner: Runner, width: int) -> float:
    """Seconds that a step with a prompt of `width` tokens takes."""
    greedy = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    return _longest_step(runner, [width], greedy)


def _longest_step(runner: Runner, widths: list[int], sampling: SamplingParams) -> float:
    """Seconds of the longest step of prompts with so many tokens, through a core of its own."""
    options = runner.options
    num_tokens = sum(widths)
    core_config = CoreConfig(
        page_size=options.page_size,
        num_pages=options.num_pages,
        max_running_requests=len(widths),
        max_batch_tokens=max(num_tokens, 2),
        max_context_len=options.max_context_len,
        vocab_size=runner.config.vocab_size,
        prefix_cache=False,
        arena_bytes=resources.arena_bytes(len(widths), num_tokens, options.max_context_len),
    )
    core = Core(core_config.to_json())
    arena = np.zeros(core_config.arena_bytes, dtype=np.uint8)
    for key, width in enumerate(widths):
        prompt = [position % runner.config.vocab_size for position in range(width)]
        submit = Submit(key=key, rid=f"trial-{key}", prompt=prompt, sampling=sampling)
        core.submit(1, msgspec.msgpack.encode(submit), time.time())
    elapsed = 0.0
    while core.has_work() and core.plan(time.time(), arena.data) is not None:
        started_at = time.perf_counter()
        result = runner.execute(Plan(arena))
        elapsed = max(elapsed, time.perf_counter() - started_at)
        core.commit(time.time(), result.data)
    return elapsed


def _check(field: Field[object], value: object) -> None:
    """Refuse a value outside the field's choices or below its minimum; None is always a default."""
    choices, minimum = field.metadata.get("choices"), field.metadata.get("minimum")
    if choices and value not in choices:
        raise SettingError(f"{field.name} is {value!r}, but must be one of {choices}")
    if minimum is None or (value is None and field.default is None):
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= minimum:
        raise SettingError(f"{field.name} is {value!r}, but must be a number from {minimum} on")


def _take(group: Group, settings: dict[str, object]) -> Group:
    """The group with those of its fields replaced that `settings` has; they are taken out of it."""
    taken = {}
    for field in fields(group):
        if field.name not in settings or is_dataclass(getattr(group, field.name)):
            continue
        value = settings.pop(field.name)
        _check(field, value)
        taken[field.name] = value
    return replace(group, **taken)
