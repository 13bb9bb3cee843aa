"""Constrained outputs of an embedded engine with a tiny random model."""

from __future__ import annotations

import asyncio
import json
import random
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from trunkline import Engine
from trunkline.engine.client import RequestRefused
from trunkline.engine.grammar import effort
from trunkline.engine.grammar.constrained_runner import ConstrainedRunner
from trunkline.engine.grammar.xgrammar_backend import XgrammarBackend
from trunkline.engine.messages import GrammarSpec
from trunkline.engine.native_request import parse_generate
from trunkline.plan import Plan

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": -3, "maximum": 120},
        "mood": {"enum": ["glad", "fröhlich", "😀", None]},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-c]{1,4}$"}},
    },
    "required": ["name", "age", "mood"],
    "additionalProperties": False,
}
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "const_string", "value": "<f>"},
            {"type": "json_schema", "json_schema": {"type": "boolean"}},
            {"type": "const_string", "value": "</f>"},
        ],
    },
}
GRAMMARS: list[tuple[dict[str, Any], Any]] = [
    ({"json_schema": PERSON}, lambda text: jsonschema.validate(json.loads(text), PERSON)),
    ({"regex": "(cat|dog) [0-9]{3}"}, re.compile("(cat|dog) [0-9]{3}").fullmatch),
    ({"ebnf": 'root ::= "(" root ")" | "x"'}, re.compile(r"(\()*x(\))*").fullmatch),
    ({"structural_tag": TAG}, re.compile("<f>(true|false)</f>").fullmatch),
]
PROMPT = [7, 8, 9, 10]
EOS = 2
Case = dict[str, Any]


@pytest.fixture(scope="module", params=["bfloat16", "float16"], ids=["cpu", "torch"])
def engine(request: pytest.FixtureRequest, tiny_model: str) -> Iterator[Engine]:
    with Engine(tiny_model, dtype=request.param, max_total_tokens=4096) as engine:
        yield engine


def submitted(engine: Engine, spec: GrammarSpec, **sampling: Any) -> Any:
    """A request with a grammar that no field of a client says."""
    body = {"input_ids": PROMPT, "sampling_params": sampling}
    job = parse_generate(body, engine._native)
    job.requests[0] = replace(job.requests[0], grammar=spec)
    return engine._host.run(engine._complete(job))


def run(engine: Engine, cases: list[Case]) -> list[Any]:
    async def main() -> list[Any]:
        return list(await asyncio.gather(*(engine.async_generate(**case) for case in cases)))

    return asyncio.run(main())


def stats(engine: Engine) -> dict[str, Any]:
    return engine._control("stats")


@pytest.mark.parametrize(("grammar", "check"), GRAMMARS, ids=[next(iter(g)) for g, _ in GRAMMARS])
def test_what_stops_by_itself_matches(engine: Engine, grammar: dict[str, Any], check: Any):
    params = {**grammar, "temperature": 1.5, "max_new_tokens": 200, "n": 6, "sampling_seed": 5}
    outputs = engine.generate(input_ids=PROMPT, sampling_params=params)
    stopped = [one for one in outputs if one["meta_info"]["finish_reason"]["type"] == "stop"]
    assert len(stopped) >= 3
    for one in stopped:
        assert one["meta_info"]["finish_reason"]["matched"] == EOS
        found = check(one["text"])
        assert found is None if grammar == GRAMMARS[0][0] else found
    engine.check_integrity()


def test_an_end_that_is_forced_stops_whatever_the_request_ignores(engine: Engine):
    params = {"regex": "a", "ignore_eos": True, "min_new_tokens": 5, "max_new_tokens": 9}
    output = engine.generate(input_ids=PROMPT, sampling_params=params)
    assert (output["text"], output["meta_info"]["finish_reason"]["type"]) == ("a", "stop")
    params = {"ebnf": 'root ::= "{"', "max_new_tokens": 9}
    assert engine.generate(input_ids=PROMPT, sampling_params=params)["text"] == "{"


def test_min_tokens_are_honoured_where_the_grammar_can_go_on(engine: Engine):
    params = {"regex": "a*", "min_new_tokens": 7, "max_new_tokens": 50, "logit_bias": {EOS: 100}}
    output = engine.generate(input_ids=PROMPT, sampling_params=params)
    assert output["meta_info"]["completion_tokens"] == 8
    assert set(output["text"]) == {"a"}


@pytest.mark.parametrize("most", [1, 2, 3])
def test_cut_short_it_ends_with_length(engine: Engine, most: int):
    params = {"json_schema": PERSON, "max_new_tokens": most}
    output = engine.generate(input_ids=PROMPT, sampling_params=params)
    assert output["meta_info"]["finish_reason"] == {"type": "length", "length": most}


def test_nothing_that_the_grammar_forbids_is_drawn(engine: Engine):
    bias = {0: 100, 1: 100, EOS: 100, 3: 100, 4: 100}
    params = {"regex": "[ab]{6}", "logit_bias": bias, "temperature": 1.0, "max_new_tokens": 20}
    output = engine.generate(input_ids=PROMPT, sampling_params=params, return_logprob=True)
    assert re.fullmatch("[ab]{6}", output["text"])
    values = [entry[0] for entry in output["meta_info"]["output_token_logprobs"]]
    assert all(-1e4 < value <= 0 for value in values)
    assert sum(values) < -1, "they are the model's own, and not near those of the masked choice"


def test_stop_strings_and_ids_cut_it(engine: Engine):
    params = {"json_schema": PERSON, "stop": ["}"], "max_new_tokens": 300, "temperature": 1.2}
    output = engine.generate(input_ids=PROMPT, sampling_params=params)
    assert output["meta_info"]["finish_reason"]["matched"] in ("}", 300)
    assert "}" not in output["text"]


def test_it_begins_after_the_ids_that_it_waits_for(engine: Engine):
    params = {"temperature": 1.0, "max_new_tokens": 400, "sampling_seed": 3, "n": 2}
    outputs = submitted(engine, GrammarSpec("regex", "(cat|dog)!", [30]), **params)
    for output in outputs:
        ids = output["output_ids"]
        assert EOS not in ids[:-1]
        if 30 in ids:
            rest = engine.tokenizer.decode(ids[ids.index(30) + 1 :])
            assert re.fullmatch("(cat|dog)!", rest)
            assert output["meta_info"]["finish_reason"]["type"] == "stop"
        else:
            assert output["meta_info"]["finish_reason"]["type"] == "length"
    assert any(30 in output["output_ids"] for output in outputs)


def test_an_unsuitable_grammar_is_refused_and_costs_nothing_else(engine: Engine):
    for params in ({"regex": "(["}, {"ebnf": 'root ::= "a'}, {"json_schema": '{"type": "banana"}'}):
        kind = next(iter(params))
        with pytest.raises(RequestRefused, match=f"Failed to compile {kind} grammar: ") as caught:
            engine.generate(input_ids=PROMPT, sampling_params=params)
        assert (caught.value.status, caught.value.kind) == (400, "invalid_request_error")
    output = engine.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": 2})
    assert output["meta_info"]["completion_tokens"] == 2
    assert stats(engine)["grammar_queue"] == 0


def cases(count: int, seed: int) -> list[Case]:
    rng = random.Random(seed)
    made = []
    for index in range(count):
        grammar = GRAMMARS[index % len(GRAMMARS)][0] if index % 5 else {}
        sampling = {
            **grammar,
            "max_new_tokens": rng.randint(20, 90),
            "sampling_seed": rng.randrange(2**63),
            "temperature": rng.choice([0.0, 1.0, 1.5]),
            "top_k": rng.choice([-1, 20]),
            "top_p": rng.choice([1.0, 0.8]),
            "frequency_penalty": rng.choice([0.0, 0.0, 0.7]),
            "min_new_tokens": rng.choice([0, 0, 15]),
            "stop": rng.choice([[], ["zz"]]),
        }
        prompt = [rng.randrange(5, 300) for _ in range(rng.randint(1, 60))]
        wants = {"return_logprob": True, "top_logprobs_num": 2} if index % 4 == 1 else {}
        made.append({"input_ids": prompt, "sampling_params": sampling, **wants})
    return made


def ids_of(outputs: list[Any]) -> list[Any]:
    return [(one["output_ids"], one["text"], one["meta_info"]["finish_reason"]) for one in outputs]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_ids_depend_on_nothing_but_the_request(
    tiny_model: str, dtype: str, monkeypatch: pytest.MonkeyPatch
):
    requests = cases(24, seed=1)
    with Engine(tiny_model, dtype=dtype, disable_jump_forward=True) as plain:
        expected = ids_of([plain.generate(**one) for one in requests])
        plain_steps = stats(plain)["steps_total"]
    with Engine(tiny_model, dtype=dtype) as jumping:
        assert ids_of([jumping.generate(**one) for one in requests]) == expected
        assert stats(jumping)["steps_total"] < plain_steps
        assert ids_of(run(jumping, requests)) == expected
        assert ids_of(run(jumping, requests)) == expected, "with the prefix cache"
    forward = ConstrainedRunner.forward

    def slowly(runner: ConstrainedRunner, plan: Plan) -> None:
        time.sleep(0.002)  # so that all requests are there before the first has ended
        forward(runner, plan)

    monkeypatch.setattr(ConstrainedRunner, "forward", slowly)
    tiny: dict[str, Any] = {"max_total_tokens": 208, "max_prefill_tokens": 32}
    with Engine(tiny_model, dtype=dtype, schedule_conservativeness=0.01, **tiny) as crowded:
        assert ids_of(run(crowded, requests)) == expected
        assert stats(crowded)["retracted_requests_total"] > 0
        crowded.check_integrity()


class Gate:
    """Holds up compilations of texts with "slow" in them, and counts all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.texts: list[str] = []
        compile_ = XgrammarBackend.compile

        def held(backend: XgrammarBackend, spec: GrammarSpec) -> bytes:
            self.texts.append(spec.text)
            if "slow" in spec.text:
                assert self.open.wait(60)
            return compile_(backend, spec)

        monkeypatch.setattr(XgrammarBackend, "compile", held)


def test_others_go_on_while_a_grammar_compiles_once_for_all_who_want_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    gate = Gate(monkeypatch)

    async def main() -> None:
        slow = {"input_ids": PROMPT, "sampling_params": {"regex": "slow|snail", "n": 2}}
        waiting = [asyncio.create_task(engine.async_generate(**slow)) for _ in range(4)]
        for _ in range(3):
            await engine.async_generate(input_ids=PROMPT, sampling_params={"max_new_tokens": 5})
        assert stats(engine)["grammar_queue"] == 4
        assert not any(task.done() for task in waiting)
        waiting[0].cancel()
        gate.open.set()
        for task in waiting[1:]:
            assert {one["text"] for one in await task} <= {"slow", "snail"}

    asyncio.run(main())
    assert gate.texts == ["slow|snail"]
    hits = stats(engine)["grammar_cache_hits_total"]
    engine.generate(input_ids=PROMPT, sampling_params={"regex": "slow|snail"})
    assert stats(engine)["grammar_cache_hits_total"] == hits + 1
    assert gate.texts == ["slow|snail"]


def test_a_compilation_that_nobody_waits_for_is_dropped(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    gate = Gate(monkeypatch)

    async def main() -> None:
        def start(text: str) -> asyncio.Task[Any]:
            params = {"regex": text}
            return asyncio.create_task(
                engine.async_generate(input_ids=PROMPT, sampling_params=params)
            )

        tasks = [start("slow a"), start("quick b"), start("quick c")]
        deadline = time.monotonic() + 30
        while stats(engine)["grammar_queue"] < 3:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        for task in tasks[:2]:
            task.cancel()
        while stats(engine)["grammar_queue"] > 1:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        gate.open.set()
        assert (await tasks[2])["text"] == "quick c"

    asyncio.run(main())
    assert gate.texts == ["slow a", "quick c"]


def test_without_a_backend_grammars_are_refused(tiny_model: str):
    with Engine(tiny_model, grammar_backend="none", max_total_tokens=512) as engine:
        with pytest.raises(RequestRefused, match="--grammar-backend none"):
            engine.generate(input_ids=PROMPT, sampling_params={"regex": "a"})
        engine.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": 2})


@pytest.mark.parametrize(
    "ambiguous",
    [
        'root ::= "a" | root root | root root root',
        "root ::= (r0 | r1 | r2)*\n"
        + "\n".join(
            f'r{n} ::= "a" | "a" r{(n + 1) % 3} "a" | r{n} r{(n + 2) % 3}' for n in range(3)
        ),
    ],
)
def test_an_ambiguous_grammar_is_ended_before_it_stops_all_others(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, ambiguous: str
):
    monkeypatch.setattr(effort, "FREE_S", 0.1)
    monkeypatch.setattr(effort, "TOKEN_S", 0.0)
    params = {"ebnf": ambiguous, "min_new_tokens": 500, "max_new_tokens": 500}
    output = engine.generate(input_ids=PROMPT, sampling_params=params)
    reason = output["meta_info"]["finish_reason"]
    assert "too ambiguous" in reason["message"]
    engine.check_integrity()
    assert engine.generate(input_ids=PROMPT, sampling_params={"regex": "a{9}"})["text"] == "a" * 9


def test_a_continuation_without_end_is_forced_piece_by_piece(engine: Engine):
    params = {"ebnf": 'root ::= "x" root', "max_new_tokens": 100}
    output = engine.generate(input_ids=PROMPT, sampling_params=params)
    assert output["meta_info"]["finish_reason"] == {"type": "length", "length": 100}
    assert set(output["text"]) == {"x"}
