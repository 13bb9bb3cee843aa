"""Settings of engine and server: frozen dataclasses, composed.

Each field's metadata holds its help text; the command line, `--config` files and the docs are
generated from it, so default and help stand once. Field names are unique over all groups:
`Engine(**settings)` and the flags use them flat.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def setting(default: Any, help: str, **extra: Any) -> Any:
    """A dataclass field with help text, and `choices` or `env` when given."""
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
        None, "path of a .jinja file; default: the model's template"
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
    context_length: int | None = setting(None, "longest sequence; default: the model's")
    revision: str | None = setting(None, "revision of a hub model")
    download_dir: str | None = setting(None, "where hub models are stored; default: the hub cache")
    json_model_override_args: str = setting("{}", "JSON object merged into the model's config.json")
    weight_version: str = setting("default", "label of the weights in meta_info")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """The KV pool and the prefix cache."""

    page_size: int = setting(16, "token positions per KV page")
    max_total_tokens: int | None = setting(
        None, "size of the KV pool in tokens; default: from free memory"
    )
    mem_fraction_static: float | None = setting(None, "share of the memory for weights and KV pool")
    disable_radix_cache: bool = setting(False, "do not reuse prefixes")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """Queueing and batching."""

    max_running_requests: int | None = setting(
        None, "most sequences in a step; default: from the pool"
    )
    max_queued_requests: int | None = setting(None, "most waiting requests; beyond it: 503")
    chunked_prefill_size: int | None = setting(
        None, "most prompt tokens of one request per step; -1: no limit"
    )
    max_prefill_tokens: int | None = setting(
        None, "token budget of a step; default: from --target-step-ms"
    )
    target_step_ms: float = setting(200.0, "step time that the default token budget aims at")
    schedule_policy: str = setting("fcfs", "queue order", choices=("fcfs", "lpm", "priority"))
    schedule_conservativeness: float = setting(1.0, "above 1: admit fewer requests, retract less")
    schedule_low_priority_values_first: bool = setting(False, "lower priority numbers go first")
    waiting_timeout_s: float | None = setting(None, "longest time in the queue; beyond it: 503")
    stream_interval: int = setting(1, "tokens per streamed chunk")
    random_seed: int | None = setting(None, "mixed into the seeds of requests that bring none")
    disable_overlap_schedule: bool = setting(
        False, "plan a step only when the last one is committed"
    )
    watchdog_timeout: float = setting(
        300.0, "seconds without progress after which the engine is restarted"
    )
    decode_log_interval: int = setting(40, "steps between log lines")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All that an engine needs; the server adds its own layer on top."""

    model: ModelOptions = field(default_factory=ModelOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    log_level: str = setting(
        "info", "log level", choices=("debug", "info", "warning", "error", "critical")
    )
