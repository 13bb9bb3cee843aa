"""Same request, same bits: alone, batched, chunked, from cache, after a retraction."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from tests.kernels.driver import Driver, Sequence
from tests.kernels.plan_builder import Params
from tests.kernels.tiny import memory_checkpoint, tiny_runner

from trunkline.engine.operation_program import OperationProgram
from trunkline.engine.runner import Runner
from trunkline.kernels.torch_reference import attention, attention_plan, tiling

NUM_TOKENS = 12
FAMILIES = ("llama-wide", "qwen3", "qwen2-mixed-window", "qwen3-moe")
DTYPES = ("float32", "bfloat16")

both_dtypes = pytest.mark.parametrize("dtype", DTYPES)
families = pytest.mark.parametrize("family", FAMILIES)


@cache
def shared_runner(family: str, dtype: str, backend: str | None = None) -> Runner:
    return tiny_runner(memory_checkpoint(family), dtype=dtype, backend=backend)


def make_requests(count: int, seed: int = 3) -> list[Sequence]:
    """Random prompts of 1 to 300 tokens, greedy and sampled in turn."""
    generator = np.random.default_rng(seed)
    lengths = [1, 16, 17, 127, 128, 129, 300, *generator.integers(1, 300, 25)]
    sampled = Params(temperature=0.9, top_p=0.95, top_k=50, frequency=0.5, repetition=1.1)
    return [
        Sequence(
            generator.integers(0, 199, length).tolist(),
            replace(sampled, seed=index) if index % 2 else Params(),
        )
        for index, length in enumerate(lengths)
    ][:count]


def same_bits(left: Sequence, right: Sequence) -> bool:
    return (left.output, left.logprobs, left.tops) == (right.output, right.logprobs, right.tops)


@cache
def solo_run(family: str, dtype: str, index: int, backend: str | None = None) -> Sequence:
    """A request of `make_requests` alone, its whole prompt in one step."""
    request = make_requests(32)[index]
    Driver(shared_runner(family, dtype, backend)).generate([request], NUM_TOKENS)
    return request


def check(family: str, dtype: str, runs: list[Sequence], backend: str | None = None) -> None:
    for index, run in enumerate(runs):
        alone = solo_run(family, dtype, index, backend)
        assert same_bits(alone, run), f"prompt of {len(alone.prompt)} tokens"


@pytest.mark.parametrize(
    ("family", "count"), [("llama-wide", 32), *((f, 12) for f in FAMILIES[1:])]
)
@both_dtypes
def test_batches(family: str, count: int, dtype: str) -> None:
    requests = make_requests(count)
    Driver(shared_runner(family, dtype)).generate(requests, NUM_TOKENS)
    check(family, dtype, requests)


@families
@both_dtypes
@pytest.mark.parametrize("chunk", [17, 100])
def test_chunked_prompts(family: str, dtype: str, chunk: int) -> None:
    requests = make_requests(8)
    Driver(shared_runner(family, dtype)).generate(requests, NUM_TOKENS, chunk=chunk)
    check(family, dtype, requests)


@both_dtypes
def test_token_by_token_prompts(dtype: str) -> None:
    requests = make_requests(6)
    Driver(shared_runner("qwen3", dtype)).generate(requests, NUM_TOKENS, chunk=1)
    check("qwen3", dtype, requests)


@pytest.mark.parametrize("family", FAMILIES[:3])
@both_dtypes
@pytest.mark.parametrize("elements", [1, 1 << 24])
def test_sizes_of_temporaries_do_not_matter(
    family: str, dtype: str, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block by block and tile by tile, or everything at once."""
    for index in range(8):
        solo_run(family, dtype, index, "torch")  # with the usual sizes
    monkeypatch.setattr(attention_plan, "CHUNK_ELEMENTS", elements)
    requests = make_requests(8)
    Driver(shared_runner(family, dtype, "torch")).generate(requests, NUM_TOKENS, chunk=170)
    check(family, dtype, requests, "torch")


def test_where_no_product_is_invariant_rows_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = make_requests(6)
    Driver(tiny_runner(memory_checkpoint("llama"), backend="torch")).generate(expected, NUM_TOKENS)
    monkeypatch.setattr(attention, "_is_invariant", lambda *_: False)
    monkeypatch.setattr(tiling, "_reference_is_invariant", lambda *_: False)
    runner = tiny_runner(memory_checkpoint("llama"), backend="torch")
    alone, together = make_requests(6), make_requests(6)
    for request in alone:
        Driver(runner).generate([request], NUM_TOKENS)
    Driver(runner).generate(together, NUM_TOKENS, chunk=17)
    for one, other, usual in zip(alone, together, expected, strict=True):
        assert same_bits(one, other)
        assert one.output == usual.output


@families
@both_dtypes
def test_host_tokens_instead_of_device_tokens(family: str, dtype: str) -> None:
    requests = make_requests(8)
    driver = Driver(shared_runner(family, dtype), device_tokens=False)
    driver.generate(requests, NUM_TOKENS)
    check(family, dtype, requests)


@families
@both_dtypes
def test_prefix_from_cache(family: str, dtype: str) -> None:
    """A prefix of whole pages and a partial page copied from a donor, at every remainder."""
    driver = Driver(shared_runner(family, dtype))
    donors = make_requests(8)
    driver.generate(donors, NUM_TOKENS)
    requests = make_requests(8)
    for donor, request in zip(donors, requests, strict=True):
        if len(request.prompt) > 1:
            driver.share_prefix(donor, request, len(request.prompt) - 1)
    driver.generate(requests, NUM_TOKENS)
    check(family, dtype, requests)


@families
@both_dtypes
def test_donor_with_another_continuation(family: str, dtype: str) -> None:
    """Only the shared tokens of a donor's page are valid; the rest is another text's."""
    driver = Driver(shared_runner(family, dtype))
    request = make_requests(7)[6]
    for shared in (21, 128, 150, 255):
        other = [(token + 1) % 199 for token in request.prompt[shared:]]
        donor = Sequence(request.prompt[:shared] + other)
        driver.generate([donor], 3)
        again = Sequence(request.prompt, request.params)
        driver.share_prefix(donor, again, shared)
        driver.generate([again], NUM_TOKENS)
        assert same_bits(solo_run(family, dtype, 6), again), shared


@families
@both_dtypes
def test_output_as_prompt_after_retraction(family: str, dtype: str) -> None:
    """A sequence loses its pages midway, and its outputs are computed again as prompt."""
    driver = Driver(shared_runner(family, dtype))
    requests = make_requests(8)
    for request in requests:
        driver.open(request)
    rows = [(request, len(request.prompt)) for request in requests]
    for _ in range(5):
        driver.step(rows)
        rows = [(request, 1) for request in requests]
    for request in requests:
        driver.close(request)
    driver.generate(requests, NUM_TOKENS, chunk=100)
    check(family, dtype, requests)


@both_dtypes
def test_rows_in_any_order(dtype: str) -> None:
    requests = make_requests(32)
    order = np.random.default_rng(0).permutation(32)
    Driver(shared_runner("llama-wide", dtype)).generate([requests[i] for i in order], NUM_TOKENS)
    check("llama-wide", dtype, requests)


@both_dtypes
def test_prompt_and_output_tokens_have_equal_logprobs(dtype: str) -> None:
    """Scoring a text equals having generated it."""
    runner = shared_runner("llama-wide", dtype)
    run = solo_run("llama-wide", dtype, 4)
    driver = Driver(runner, top_n=1)
    for end, value in enumerate(run.logprobs, start=len(run.prompt)):
        again = Sequence(run.tokens[:end], Params(bias={run.tokens[end]: 1e4}))
        driver.generate([again], 1)
        assert again.output == [run.tokens[end]]
        assert again.logprobs == [value]


@both_dtypes
def test_garbage_outside_a_row_is_never_read(dtype: str) -> None:
    """Everything in the pool that is not a row's own KV may be NaN."""
    options = {"dtype": dtype, "backend": "torch"}
    runner = tiny_runner(memory_checkpoint("mistral-window"), **options)
    clean = make_requests(6)
    Driver(runner).generate(clean, NUM_TOKENS)
    dirty = tiny_runner(memory_checkpoint("mistral-window"), **options)
    assert isinstance(dirty._program, OperationProgram)
    pool = dirty._program._kv
    with torch.inference_mode():
        pool.data[:, :, :, pool.spec.page_size :] = torch.nan
    requests = make_requests(6)
    Driver(dirty).generate(requests, NUM_TOKENS, chunk=17)
    for alone, other in zip(clean, requests, strict=True):
        assert same_bits(alone, other)
    assert not pool.data[:, :, :, : pool.spec.page_size].any(), "page 0 was written"


@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_page_size_does_not_matter(page_size: int) -> None:
    pages = {1: 4000, 4: 1200, 64: 60}[page_size]
    runner = tiny_runner(
        memory_checkpoint("qwen3"), dtype="float32", page_size=page_size, num_pages=pages
    )
    requests = make_requests(8)
    Driver(runner).generate(requests, NUM_TOKENS)
    check("qwen3", "float32", requests)
