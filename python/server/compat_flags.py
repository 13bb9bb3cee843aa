"""Flags of other engines that have no setting of ours behind them: one table, no logic.

Each is accepted in a command line or `--config` file, and one of four things holds. It was
*removed* there too and is accepted with a warning; it asks for what is *always* so here; it has *no
effect* here, which a warning says; or it is *refused* unless it has a neutral value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Verdict = Literal["removed", "always", "no effect", "refused"]


@dataclass(frozen=True, slots=True)
class CompatFlag:
    """One flag. `is_switch`: it takes no value. `neutral`: values that are always fine."""

    name: str
    verdict: Verdict
    reason: str
    is_switch: bool = False
    neutral: tuple[str, ...] = ()


def _refused(name: str, reason: str, *neutral: str) -> CompatFlag:
    return CompatFlag(name, "refused", reason, neutral=neutral)


def _refused_switch(name: str, reason: str) -> CompatFlag:
    return CompatFlag(name, "refused", reason, is_switch=True)


def _removed(name: str, *, is_switch: bool = False) -> CompatFlag:
    return CompatFlag(name, "removed", "the feature no longer exists", is_switch)


def _always(name: str, reason: str) -> CompatFlag:
    return CompatFlag(name, "always", reason, is_switch=True)


def _no_effect(name: str, reason: str, *neutral: str, is_switch: bool = False) -> CompatFlag:
    return CompatFlag(name, "no effect", reason, is_switch, neutral)


LATER: Final = "not supported yet"

COMPAT_FLAGS: Final = (
    _refused("tokenizer-mode", "only fast tokenizers are supported", "auto", "fast"),
    _refused_switch("skip-tokenizer-init", LATER),
    _no_effect("trust-remote-code", "code from a checkpoint is never run", is_switch=True),
    _no_effect("is-embedding", "every model embeds and generates", is_switch=True),
    _refused("cpu-offload-gb", LATER, "0"),
    _refused("tp-size", "tensor parallelism is not supported yet", "1"),
    _refused("pp-size", "pipeline parallelism is not supported yet", "1"),
    _refused("ep-size", "expert parallelism is not supported yet", "1"),
    _refused("nnodes", "several nodes are not supported yet", "1"),
    _refused("node-rank", "several nodes are not supported yet", "0"),
    _refused("dist-init-addr", "several nodes are not supported yet"),
    _refused("base-gpu-id", "choose the device with CUDA_VISIBLE_DEVICES", "0"),
    _refused("constrained-json-whitespace-pattern", "blanks in JSON are bounded and not a choice"),
    _refused("lora-paths", "adapters are not supported yet"),
    _refused_switch("enable-lora", "adapters are not supported yet"),
    _no_effect("max-loras-per-batch", "adapters are not supported yet", "8"),
    _refused("sampling-backend", "every kernel backend has one sampler", "auto", "pytorch"),
    _refused("speculative-algorithm", LATER),
    _refused("disaggregation-mode", LATER, "null"),
    _refused_switch("enable-hierarchical-cache", LATER),
    _refused_switch("enable-dp-attention", LATER),
    _refused_switch("enable-torch-compile", LATER),
    _no_effect("torch-compile-max-bs", "models are not compiled", "32"),
    _refused_switch("delete-ckpt-after-loading", "this server never deletes a model"),
    _refused_switch("show-time-cost", LATER),
    _always("enable-metrics", "/metrics is always there"),
    _always("enable-http2", "HTTP/2 is always spoken to who asks for it"),
    _always("enable-cache-report", "usage always reports cached tokens"),
    _always("enable-response-store", "responses are stored (see --response-store-bytes)"),
    _always("enable-mixed-chunk", "prompts and running requests always share steps"),
    _no_effect(
        "disable-cuda-graph-padding", "steps are always padded to a captured size", is_switch=True
    ),
    _always("disable-custom-all-reduce", "there is one device"),
    _always("enable-nan-detection", "a row that is not finite ends its request, always"),
    _always("triton-attention-reduce-in-fp32", "reductions are always in float32"),
    _no_effect("enable-p2p-check", "there is one device", is_switch=True),
    _no_effect("num-continuous-decode-steps", "every step is scheduled", "1"),
    _no_effect("disable-outlines-disk-cache", "there is no such cache", is_switch=True),
    _removed("disable-mla", is_switch=True),
    _removed("torchao-config"),
    _removed("enable-double-sparsity", is_switch=True),
    _removed("ds-channel-config-path"),
    _removed("ds-heavy-channel-num"),
    _removed("ds-heavy-token-num"),
    _removed("ds-heavy-channel-type"),
    _removed("ds-sparse-decode-threshold"),
    _removed("enable-overlap-schedule", is_switch=True),
    _removed("disable-flashinfer", is_switch=True),
    _removed("disable-flashinfer-sampling", is_switch=True),
    _removed("disable-disk-cache", is_switch=True),
)

# Other spellings of flags, ours and those above.
ALIASES: Final = {
    "model-path": ("model",),
    "tokenizer-path": ("tokenizer",),
    "context-length": ("max-model-len",),
    "access-log-exclude-prefixes": ("uvicorn-access-log-exclude-prefixes",),
    "tp-size": ("tp", "tensor-parallel-size"),
    "dp-size": ("dp", "data-parallel-size"),
    "pp-size": ("pp", "pipeline-parallel-size"),
    "ep-size": ("ep", "expert-parallel-size"),
    "dist-init-addr": ("nccl-init-addr",),
    "file-storage-path": ("file-storage-pth",),
    "mem-fraction-static": ("gpu-memory-utilization",),
}
