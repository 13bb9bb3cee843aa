"""Settings of engine and server: frozen dataclasses, composed.

Each field's metadata holds its help text; the command line, `--config` files and the docs are
generated from it, so default and help stand once. Field names are unique over all groups:
`Engine(**settings)` and the flags use them flat.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Final

SECRET: Final = "***"


def setting(default: Any, help: str, **extra: Any) -> Any:
    """A dataclass field with help text; `choices`, `minimum`, `maximum`, `env`, `secret` if any."""
    return field(default=default, metadata={"help": help, **extra})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Which model, and how it is loaded."""

    model_path: str | None = setting(
        None,
        "Hugging Face directory, hub id or .gguf file; default: the embedded SmolLM2-135M-Instruct",
    )
    tokenizer_path: str | None = setting(None, "tokenizer directory or file; default: the model's")
    served_model_name: str | None = setting(None, "name in /v1/models; default: the model path")
    chat_template: str | None = setting(
        None, "a .jinja file, or a .json file with chat_template; default: the model's template"
    )
    load_format: str = setting(
        "auto", "how weights are stored", choices=("auto", "safetensors", "pt", "gguf", "dummy")
    )
    dtype: str = setting(
        "auto",
        "dtype of weights and activations",
        choices=("auto", "half", "float16", "bfloat16", "float", "float32"),
    )
    device: str = setting("auto", "device to run on", choices=("auto", "cpu", "cuda"))
    context_length: int | None = setting(None, "longest sequence; default: the model's", minimum=2)
    revision: str | None = setting(None, "revision of a hub model")
    download_dir: str | None = setting(None, "where hub models are stored; default: the hub cache")
    json_model_override_args: str = setting("{}", "JSON object merged into the model's config.json")
    weight_version: str = setting("default", "label of the weights in meta_info")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelOptions:
    """How the model is computed."""

    attention_backend: str = setting(
        "auto",
        "kernels that attend: on CUDA flashinfer where it is installed and fits, else triton "
        "(auto); torch_native: the reference backend, slow, on any device",
        choices=("auto", "flashinfer", "triton", "torch_native"),
    )
    kv_cache_dtype: str = setting(
        "auto",
        "how keys and values are stored; auto: as activations are; fp8_e4m3: CUDA only",
        choices=("auto", "fp8_e4m3"),
    )
    quantization: str = setting(
        "auto",
        "weights of linears. On a CPU, the embedding's too: int8: eight bits; gguf: a .gguf file's "
        "own blocks, where its types can be packed, else int8. fp8: CUDA only (compute capability "
        "9.0 or newer). none: as dtype says. auto: on a CPU gguf for files whose matrices are all "
        "quantised and would take more than 1 GiB otherwise, else none",
        choices=("auto", "none", "int8", "gguf", "fp8"),
    )
    enable_deterministic_inference: bool = setting(
        False,
        "CUDA: a request's tokens do not depend on what else runs; slower (elsewhere always so)",
    )
    disable_cuda_graph: bool = setting(False, "CUDA: launch the kernels of every step one by one")
    cuda_graph_max_bs: int | None = setting(
        None,
        "CUDA: rows of the largest decode step that is captured as a graph; default: 256, on "
        "devices below 80 GiB 160",
        minimum=1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """The KV pool and the prefix cache."""

    page_size: int = setting(16, "token positions per KV page", minimum=1)
    max_total_tokens: int | None = setting(
        None, "size of the KV pool in tokens; default: from free memory", minimum=1
    )
    mem_fraction_static: float | None = setting(
        None,
        "share of the memory for weights and KV pool, which takes its part soon after the start; "
        "no effect with --max-total-tokens",
        minimum=0,
    )
    disable_radix_cache: bool = setting(False, "do not reuse prefixes")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """Queueing and batching."""

    max_running_requests: int | None = setting(
        None, "most sequences in a step; default: from the pool", minimum=1
    )
    max_queued_requests: int | None = setting(
        None, "most waiting requests; beyond it: 503", minimum=1
    )
    chunked_prefill_size: int | None = setting(
        None, "most prompt tokens of one request per step; -1: no limit", minimum=-1
    )
    max_prefill_tokens: int | None = setting(
        None, "token budget of a step; default: from --target-step-ms", minimum=2
    )
    target_step_ms: float = setting(
        200.0, "step time that the default token budget aims at", minimum=1
    )
    target_mixed_step_ms: float = setting(
        26.0,
        "the same for steps in which other requests get their next token, followed while serving: "
        "how long a prompt may hold them up; higher: first tokens come sooner. While for seconds "
        "more than a quarter of the requests waits for a first token, up to 2.5 times as long",
        minimum=1,
    )
    schedule_policy: str = setting("fcfs", "queue order", choices=("fcfs", "lpm", "priority"))
    schedule_conservativeness: float = setting(
        1.0, "above 1: admit fewer requests, retract less", minimum=0
    )
    schedule_low_priority_values_first: bool = setting(
        False, "with the policy priority, lower numbers go first"
    )
    waiting_timeout_s: float | None = setting(
        None, "longest time in the queue; beyond it: 503", minimum=0.001
    )
    logprobs_mode: str = setting(
        "model",
        "log-probs of outputs: the model's own, or processed: after penalties, bias, masks and "
        "temperature",
        choices=("model", "processed"),
    )
    stream_interval: int = setting(1, "tokens per streamed chunk", minimum=1)
    random_seed: int | None = setting(None, "mixed into the seeds of requests that bring none")
    watchdog_timeout: float = setting(
        300.0,
        "engine-serve: seconds without progress after which the engine is restarted",
        minimum=1,
    )
    decode_log_interval: int = setting(40, "steps between log lines", minimum=1)
    disable_overlap_schedule: bool = setting(
        False,
        "plan a step only when the one before it is committed, also where the device works by "
        "itself (the outputs are the same)",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarOptions:
    """Structured output."""

    grammar_backend: str = setting(
        "xgrammar",
        "what compiles grammars; none: structured output is refused",
        choices=("xgrammar", "none"),
    )
    grammar_compile_timeout: float = setting(
        30.0, "seconds of a core that a grammar may take to compile; beyond it: 400", minimum=0.01
    )
    grammar_cache_bytes: int = setting(
        256 << 20, "memory for compiled grammars; one may take a quarter of it", minimum=4
    )
    disable_jump_forward: bool = setting(
        False, "sample tokens that the grammar leaves no choice about, too (they are the same)"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelOptions:
    """Several engines behind one address."""

    dp_size: int = setting(
        1,
        "engine-serve: engines that each have the whole model and an equal part of memory and "
        "cores; every one gets its part of --max-running-requests, other limits hold for each",
        minimum=1,
    )
    load_balance_method: str = setting(
        "auto",
        "which engine gets a request: cache_aware (auto, unless there is no cache: then "
        "total_tokens) weighs what each has to compute, less what it probably has cached; "
        "total_tokens: the least to compute; total_requests and "
        "shortest_queue: the fewest requests",
        choices=(
            "auto",
            "cache_aware",
            "round_robin",
            "shortest_queue",
            "total_requests",
            "total_tokens",
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """General.

    All that an engine needs; the server adds its own layer on top.
    """

    model: ModelOptions = field(default_factory=ModelOptions)
    kernels: KernelOptions = field(default_factory=KernelOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    grammar: GrammarOptions = field(default_factory=GrammarOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    log_level: str = setting(
        "info", "log level", choices=("debug", "info", "warning", "error", "critical")
    )


def flat_settings(config: object) -> dict[str, object]:
    """All settings of a config and of those inside it by their flat names, secrets replaced."""
    settings: dict[str, object] = {}
    for one in fields(config):  # type: ignore[arg-type]
        value = getattr(config, one.name)
        if is_dataclass(value):
            settings |= flat_settings(value)
        else:
            settings[one.name] = SECRET if one.metadata.get("secret") and value else value
    return settings


def settings_line(config: object) -> str:
    """The line by which a log says with what settings something runs."""
    settings = ", ".join(f"{name}={value!r}" for name, value in flat_settings(config).items())
    return f"server_args=ServerArgs({settings})"
