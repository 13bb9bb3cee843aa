"""`Engine` with a tiny random model: shapes of calls and results, chat, errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoints import TinyCheckpoint
from tests.engine.test_engine_outputs import META_KEYS

from trunkline import Engine, EngineDied, RequestError, RequestRefused, SettingError
from trunkline.engine.config import CacheOptions, ModelOptions, SchedulerOptions

GREEDY = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine(tiny_model: str) -> Iterator[Engine]:
    with Engine(tiny_model, max_total_tokens=4096, max_prefill_tokens=256) as started:
        yield started


def running(engine: Engine) -> float:
    stats: dict[str, float] = engine.server_info()["stats"]  # type: ignore[assignment]
    return stats["num_running"] + stats["num_waiting"]


def test_every_setting_may_be_at_its_minimum(tiny_model: str) -> None:
    """What the settings allow, resources, core and runner take."""
    beyond = ("mem_fraction_static", "schedule_conservativeness")  # more than 0, by resources.py
    minima = {
        setting.name: setting.metadata["minimum"]
        for group in (ModelOptions, CacheOptions, SchedulerOptions)
        for setting in fields(group)
        if "minimum" in setting.metadata and setting.name not in beyond
    }
    assert len(minima) > 10
    with Engine(tiny_model, **minima | {"max_total_tokens": 2}) as engine:
        output = engine.generate(input_ids=[5], sampling_params={**GREEDY, "max_new_tokens": 1})
        assert len(output["output_ids"]) == 1


def test_facts_tell_how_many_sequences_can_really_run(tiny_model: str) -> None:
    settings = {"max_running_requests": 100, "max_prefill_tokens": 64, "max_total_tokens": 4096}
    with Engine(tiny_model, **settings) as engine:
        info: dict[str, Any] = engine.server_info()
        assert info["max_running_requests"] == info["stats"]["max_running"] == 56
        assert info["settings"]["max_running_requests"] == 100


def test_one_prompt_gives_a_dict_with_every_key(engine: Engine) -> None:
    output = engine.generate("The quick brown fox", GREEDY)
    assert set(output) == {"text", "output_ids", "meta_info"}
    meta = output["meta_info"]
    assert list(meta) == META_KEYS
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert len(output["output_ids"]) == meta["completion_tokens"] == 6
    assert output["text"] == engine.tokenizer.decode(output["output_ids"])
    assert meta["prompt_tokens"] == len(engine.tokenizer.encode("The quick brown fox"))
    assert meta["request_received_ts"] <= meta["forward_entry_time"]
    assert (
        meta["forward_entry_time"] <= meta["prefill_finished_time"] <= meta["request_finished_ts"]
    )
    assert meta["e2e_latency"] >= meta["first_token_latency"] > 0
    assert meta["queue_time"] >= 0
    assert meta["decode_throughput"] > 0


def test_lists_of_prompts_ids_and_params_keep_their_order(engine: Engine) -> None:
    prompts = ["The quick", "brown fox", "jumps over"]
    single = [engine.generate(prompt, GREEDY)["output_ids"] for prompt in prompts]
    assert [output["output_ids"] for output in engine.generate(prompts, GREEDY)] == single
    ids = engine.tokenizer.encode_batch(prompts)
    outputs = engine.generate(
        input_ids=ids, sampling_params=[{**GREEDY, "max_new_tokens": n} for n in (1, 2, 3)]
    )
    assert [output["output_ids"] for output in outputs] == [
        tokens[:n] for n, tokens in enumerate(single, 1)
    ]
    (one,) = engine.generate([prompts[0]], GREEDY)
    assert one["output_ids"] == single[0]
    assert engine.generate(input_ids=ids[1], sampling_params=GREEDY)["output_ids"] == single[1]


def test_samples_are_distinct_and_repeat_with_their_seed(engine: Engine) -> None:
    params = {"n": 3, "max_new_tokens": 12, "ignore_eos": True, "sampling_seed": 7}
    first = engine.generate("The quick", params, rid="many")
    second = engine.generate("The quick", params)
    assert [o["output_ids"] for o in first] == [o["output_ids"] for o in second]
    assert len({tuple(o["output_ids"]) for o in first}) == 3
    assert [o["meta_info"]["id"] for o in first] == ["many_0", "many_1", "many_2"]


def test_streams_grow_to_the_whole_output(engine: Engine) -> None:
    whole = engine.generate("The quick brown", GREEDY)
    chunks = list(engine.generate("The quick brown", GREEDY, stream=True))
    assert chunks[-1]["output_ids"] == whole["output_ids"]
    assert chunks[-1]["text"] == whole["text"]
    lengths = [len(chunk["output_ids"]) for chunk in chunks]
    assert lengths == sorted(lengths)
    reasons = [chunk["meta_info"]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + [{"type": "length", "length": 6}]
    assert "index" not in chunks[0]


def test_streamed_batches_are_tagged_with_their_index(engine: Engine) -> None:
    prompts = ["The quick", "brown fox"]
    params = {**GREEDY, "n": 2, "temperature": 1.0, "sampling_seed": 3}
    whole = engine.generate(prompts, params)
    last: dict[int, dict[str, Any]] = {}
    for chunk in engine.generate(prompts, params, stream=True):
        last[chunk["index"]] = chunk
    assert [last[i]["output_ids"] for i in range(4)] == [o["output_ids"] for o in whole]


def test_asynchronous_calls_give_the_same(engine: Engine) -> None:
    async def main() -> None:
        output = await engine.async_generate("The quick brown", GREEDY)
        assert output["output_ids"] == whole["output_ids"]
        chunks = [chunk async for chunk in await engine.async_generate(long, GREEDY, stream=True)]
        assert chunks[-1]["output_ids"] == longer["output_ids"]
        outputs = await asyncio.gather(
            *(engine.async_generate("The quick brown", GREEDY) for _ in range(20))
        )
        assert all(o["output_ids"] == whole["output_ids"] for o in outputs)

    long = "The quick brown fox jumps " * 5
    whole, longer = engine.generate("The quick brown", GREEDY), engine.generate(long, GREEDY)
    asyncio.run(main())


def test_logprobs_come_with_the_prompt_or_without(engine: Engine) -> None:
    prompt = "The quick brown fox"
    output = engine.generate(
        prompt,
        GREEDY,
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
        return_text_in_logprobs=True,
    )
    meta = output["meta_info"]
    tokens = engine.tokenizer.encode(prompt)
    assert [entry[1] for entry in meta["input_token_logprobs"]] == tokens
    assert meta["input_token_logprobs"][0][0] is None
    assert [entry[1] for entry in meta["output_token_logprobs"]] == output["output_ids"]
    assert all(entry[0] < 0 for entry in meta["output_token_logprobs"])
    for entry, top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        assert top[0] == entry  # greedy: the best token is the one chosen
        assert len(top) == 2
        assert isinstance(entry[2], str)
    again = engine.generate(prompt, GREEDY, return_logprob=True, logprob_start_len=0)["meta_info"]
    values = [entry[:2] for entry in meta["input_token_logprobs"]]
    assert [entry[:2] for entry in again["input_token_logprobs"]] == values
    plain = engine.generate(prompt, GREEDY, return_logprob=True)["meta_info"]
    assert plain["input_token_logprobs"] == []
    assert plain["output_token_logprobs_length"] == 6


def test_chat_answers_through_the_template(engine: Engine) -> None:
    messages = [{"role": "user", "content": "the quick brown fox"}]
    output = engine.chat(messages, {**GREEDY, "max_new_tokens": 4})
    text = "<|im_start|>user\nthe quick brown fox<|im_end|>\n<|im_start|>assistant\n"
    ids = engine.tokenizer.encode(text, add_special_tokens=False)
    assert output["meta_info"]["prompt_tokens"] == len(ids)
    direct = engine.generate(input_ids=ids, sampling_params={**GREEDY, "max_new_tokens": 4})
    assert output["output_ids"] == direct["output_ids"]
    unbounded = {"temperature": 0, "ignore_eos": True}
    chunks = list(engine.chat(messages, unbounded, stream=True))
    total = len(ids) + len(chunks[-1]["output_ids"])
    assert total == 512  # as long as the context allows
    assert (
        asyncio.run(engine.async_chat(messages, GREEDY))["output_ids"][:4] == output["output_ids"]
    )


def test_requests_that_cannot_be_served_say_why(engine: Engine) -> None:
    with pytest.raises(RequestError, match="temperature"):
        engine.generate("a", {"temperature": -1})
    with pytest.raises(RequestError, match="frobnicate"):
        engine.generate("a", {"frobnicate": 1})
    with pytest.raises(RequestError, match="context length"):
        engine.generate(input_ids=[5] * 512)
    with pytest.raises(RequestError, match="neither"):
        engine.generate()
    with pytest.raises(TypeError, match="unknown request fields: flavour"):
        engine.generate("a", flavour="salty")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="return_logprobs; did you mean return_logprob"):
        engine.generate("a", return_logprobs=True)  # type: ignore[call-arg]


def test_aborts_end_requests_with_what_they_have(engine: Engine) -> None:
    stream = engine.generate(
        "The quick", {"max_new_tokens": 400, "ignore_eos": True}, stream=True, rid="long"
    )
    next(stream)
    engine.abort("lon")  # no prefix matching
    engine.abort("long")
    last = list(stream)[-1]
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(last["output_ids"]) < 400
    stream = engine.generate("The", {"max_new_tokens": 400, "ignore_eos": True}, stream=True)
    next(stream)
    engine.abort_all()
    assert list(stream)[-1]["meta_info"]["finish_reason"]["type"] == "abort"


def test_no_new_tokens_and_one(engine: Engine) -> None:
    for count in (0, 1):
        params = {**GREEDY, "max_new_tokens": count}
        output = engine.generate("The quick", params)
        streamed = list(engine.generate("The quick", params, stream=True))[-1]
        for one in (output, streamed):
            assert len(one["output_ids"]) == one["meta_info"]["completion_tokens"] == count
            assert one["meta_info"]["finish_reason"] == {"type": "length", "length": count}
    scored = engine.generate(
        "The quick", {"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0
    )["meta_info"]
    assert len(scored["input_token_logprobs"]) == scored["prompt_tokens"]


def test_cached_tokens_and_flush(engine: Engine) -> None:
    ids = list(range(10, 60))
    assert engine.flush_cache()
    for expected in (0, 49):
        meta = engine.generate(input_ids=ids, sampling_params=GREEDY)["meta_info"]
        assert meta["cached_tokens"] == expected
        assert meta["cached_tokens_details"] == ({"device": 49, "host": 0} if expected else None)
    shared = [*ids[:21], *range(200, 230)]
    assert (
        engine.generate(input_ids=shared, sampling_params=GREEDY)["meta_info"]["cached_tokens"]
        == 21
    )
    assert engine.flush_cache()
    stats = engine.server_info()["stats"]
    assert stats["free_tokens"] == stats["total_tokens"]  # type: ignore[index]


def test_server_info_has_sizes_settings_and_counters(engine: Engine) -> None:
    info = engine.server_info()
    assert info["max_total_tokens"] == 4096
    assert info["context_length"] == 512
    assert info["dtype"] == "bfloat16"
    assert info["settings"]["page_size"] == 16  # type: ignore[index]


def test_settings_are_checked(tiny_model: str) -> None:
    with pytest.raises(TypeError, match="unknown engine settings: maximum_fun"):
        Engine(tiny_model, maximum_fun=1)
    with pytest.raises(SettingError, match="schedule_policy"):
        Engine(tiny_model, schedule_policy="random")
    with pytest.raises(SettingError, match="context_length"):
        Engine(tiny_model, context_length=1 << 20)


@pytest.mark.usefixtures("slow_runner")
def test_a_full_queue_refuses(tiny_model: str) -> None:
    long = {"max_new_tokens": 300, "ignore_eos": True}
    settings = {"max_running_requests": 1, "max_queued_requests": 1, "max_total_tokens": 1024}

    async def main() -> None:
        streams = [
            await engine.async_generate("The", long, stream=True, rid=f"r{i}") for i in range(2)
        ]
        await anext(streams[0])
        waiting = asyncio.ensure_future(anext(streams[1]))
        await asyncio.sleep(0.05)
        with pytest.raises(RequestRefused, match="queue is full") as refused:
            await engine.async_generate("The", long)
        assert refused.value.status == 503
        await streams[0].aclose()
        await waiting
        await streams[1].aclose()

    with Engine(tiny_model, max_prefill_tokens=64, **settings) as engine:
        asyncio.run(main())


def test_a_prompt_beyond_the_pool_is_refused_at_once(tiny_model: str) -> None:
    with Engine(tiny_model, max_total_tokens=64, max_prefill_tokens=64) as engine:
        with pytest.raises(RequestRefused, match="100"):
            engine.generate(input_ids=[7] * 100)
        assert len(engine.generate(input_ids=[7] * 10, sampling_params=GREEDY)["output_ids"]) == 6


def test_an_engine_that_was_shut_down_says_so(tiny_model: str) -> None:
    engine = Engine(tiny_model, max_total_tokens=1024, max_prefill_tokens=64)
    stream = engine.generate("The", {"max_new_tokens": 400, "ignore_eos": True}, stream=True)
    next(stream)
    engine.shutdown()
    engine.shutdown()
    with pytest.raises(EngineDied, match="shut down"):
        list(stream)
    with pytest.raises(EngineDied, match="shut down"):
        engine.generate("a")
    with pytest.raises(EngineDied, match="shut down"):
        asyncio.run(engine.async_generate("a"))


def test_log_levels_are_an_engines_own(tiny_model: str, caplog: pytest.LogCaptureFixture) -> None:
    with Engine(tiny_model, max_total_tokens=1024, max_prefill_tokens=64, log_level="info"):
        assert "max_total_num_tokens=1024" in caplog.text
        assert "server_args=ServerArgs(" in caplog.text
    caplog.clear()
    caplog.set_level("INFO")
    with Engine(tiny_model, max_total_tokens=1024, max_prefill_tokens=64, log_level="error"):
        assert "max_total_num_tokens" not in caplog.text


def test_fields_without_effect_are_named(tiny_model: str, caplog: pytest.LogCaptureFixture) -> None:
    with Engine(tiny_model, max_total_tokens=1024, max_prefill_tokens=64) as engine:
        caplog.clear()
        engine.generate("a", GREEDY, top_logprobs_num=0)
        assert "without effect" not in caplog.text
        engine.generate("a", GREEDY, top_logprobs_num=2)
        assert "without effect in this request: top_logprobs_num" in caplog.text


def test_what_a_chat_has_no_use_for_is_named_or_refused(
    tiny_model: str, caplog: pytest.LogCaptureFixture
) -> None:
    messages = [{"role": "user", "content": "a"}]
    with Engine(tiny_model, max_total_tokens=1024, max_prefill_tokens=64) as engine:
        caplog.clear()
        engine.chat(messages, GREEDY, template_arguments={"mood": 1})
        assert "without effect in this request: template_arguments.mood" in caplog.text
        with pytest.raises(RequestError, match="leave input_ids out"):
            engine.chat(messages, GREEDY, input_ids=[1])


def test_end_tokens_outside_the_vocabulary_are_left_out(tmp_path: Path) -> None:
    model = TinyCheckpoint(config={"eos_token_id": [2, 5000, 10**9]}).write(tmp_path)
    with Engine(str(model), max_total_tokens=2048, max_prefill_tokens=64) as engine:
        output = engine.generate("The quick", {"min_new_tokens": 6, "max_new_tokens": 6})
    assert output["meta_info"]["completion_tokens"] == 6
