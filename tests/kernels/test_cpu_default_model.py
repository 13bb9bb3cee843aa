"""The default model on the CPU kernels against the reference backend in float32."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from tests.kernels.driver import Driver, Sequence
from tests.prompts import PROMPTS

from trunkline.engine.config import ModelOptions
from trunkline.engine.runner import Runner, RunnerOptions
from trunkline.engine.weights import open_checkpoint
from trunkline.kernels import BackendOptions

NUM_TOKENS = 24


def runner(backend: str, dtype: str, quantization: str = "none") -> Runner:
    options = RunnerOptions(
        backend=backend,
        dtype=dtype,
        computation=BackendOptions(quantization=quantization),
        num_pages=400,
        max_running_requests=8,
        max_context_len=1024,
        progress=False,
    )
    return Runner(open_checkpoint(ModelOptions()), options)


@cache
def reference() -> list[Sequence]:
    tokenizer = open_checkpoint(ModelOptions()).tokenizer
    sequences = [Sequence(tokenizer.encode(prompt)) for prompt in PROMPTS[:12]]
    for start in range(0, len(sequences), 4):
        chunk = sequences[start : start + 4]
        driver = Driver(runner_of("torch", "float32"))
        driver.generate(chunk, NUM_TOKENS)
    return sequences


@cache
def runner_of(backend: str, dtype: str, quantization: str = "none") -> Runner:
    return runner(backend, dtype, quantization)


@pytest.mark.slow
def test_float32_generates_the_same_text() -> None:
    for expected in reference():
        ours = Sequence(expected.prompt)
        Driver(runner_of("cpu", "float32")).generate([ours], NUM_TOKENS)
        assert ours.output == expected.output
        np.testing.assert_allclose(ours.logprobs, expected.logprobs, atol=1e-3)


@pytest.mark.slow
def test_bfloat16_agrees_on_the_best_token() -> None:
    """Teacher-forced; where it disagrees, the two tokens were nearly equal."""
    steps, agreed, errors = 0, 0, []
    for expected in reference():
        driver = Driver(runner_of("cpu", "bfloat16"))
        for index in range(NUM_TOKENS):
            forced = Sequence(expected.prompt + expected.output[:index])
            driver.generate([forced], 1)
            driver.release([forced])
            steps += 1
            agreed += forced.output[0] == expected.output[index]
            best, second = expected.tops[index]
            errors.append(abs(forced.logprobs[0] - expected.logprobs[index]))
            if forced.output[0] != expected.output[index]:
                assert best[1] - second[1] < 0.2
    assert agreed / steps > 0.98, f"{agreed} of {steps}"
    assert np.mean(errors) < 0.05
    print(f"{agreed} of {steps} agree, mean error of log-probs {np.mean(errors):.4f}")


@pytest.mark.slow
def test_the_packed_file_is_near_its_dequantised_self() -> None:
    """What the default model is served with: its file's own blocks, against float32."""
    assert runner("cpu", "bfloat16", "auto").quantization == "gguf"
    steps, agreed, errors = 0, 0, []
    for expected in reference():
        driver = Driver(runner_of("cpu", "bfloat16", "gguf"))
        for index in range(NUM_TOKENS):
            forced = Sequence(expected.prompt + expected.output[:index])
            driver.generate([forced], 1)
            driver.release([forced])
            steps += 1
            best, second = expected.tops[index]
            ours = dict(forced.tops[0])
            if best[0] in ours:
                errors.append(abs(ours[best[0]] - best[1]))
            if forced.output[0] == expected.output[index]:
                agreed += 1
            else:
                assert best[1] - second[1] < 0.5
    assert agreed / steps > 0.95, f"{agreed} of {steps}"
    assert np.mean(errors) < 0.1
    print(f"{agreed} of {steps} agree, mean error of log-probs {np.mean(errors):.4f}")
