"""Log-probs of what is drawn from, through the whole engine and on both backends."""

from __future__ import annotations

import math
from typing import Any

import pytest

from trunkline import Engine

SETTINGS: dict[str, Any] = {"max_total_tokens": 1024, "log_level": "error"}
SCORED = {"return_logprob": True, "token_ids_logprob": list(range(320)), "logprob_start_len": 0}


def outputs_of(model: str, mode: str, dtype: str, sampling: dict[str, Any]) -> dict[str, Any]:
    with Engine(model, dtype=dtype, logprobs_mode=mode, **SETTINGS) as engine:
        params = {"max_new_tokens": 6, "ignore_eos": True, "sampling_seed": 1, **sampling}
        output = engine.generate("the quick fox", params, **SCORED)
    meta: dict[str, Any] = output["meta_info"]
    return {"ids": output["output_ids"], **meta}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])  # our kernels, and the reference
def test_processed_logprobs_follow_from_the_models_own(tiny_model: str, dtype: str) -> None:
    sampling = {"temperature": 0.5, "top_k": 20, "logit_bias": {"7": 3.0}}
    own = outputs_of(tiny_model, "model", dtype, sampling)
    processed = outputs_of(tiny_model, "processed", dtype, sampling)
    assert own["ids"] == processed["ids"]
    assert own["input_token_logprobs"] == processed["input_token_logprobs"]
    assert own["input_token_ids_logprobs"] == processed["input_token_ids_logprobs"]
    for step, token in enumerate(own["ids"]):
        raw = {entry[1]: entry[0] for entry in own["output_token_ids_logprobs"][step]}
        scaled = {one: (value + 3.0 * (one == 7)) / 0.5 for one, value in raw.items()}
        total = math.log(sum(math.exp(value) for value in scaled.values()))
        [value, sampled, _] = processed["output_token_logprobs"][step]
        assert sampled == token
        assert value == pytest.approx(scaled[token] - total, abs=1e-3)
        shown = processed["output_token_ids_logprobs"][step]
        assert sum(math.exp(entry[0]) for entry in shown) == pytest.approx(1, abs=1e-3)


def test_greedy_processed_logprobs_are_not_divided(tiny_model: str) -> None:
    own = outputs_of(tiny_model, "model", "bfloat16", {"temperature": 0})
    processed = outputs_of(tiny_model, "processed", "bfloat16", {"temperature": 0})
    for left, right in zip(
        own["output_token_logprobs"], processed["output_token_logprobs"], strict=True
    ):
        assert left[0] == pytest.approx(right[0], abs=1e-5)
        assert left[1] == right[1]
