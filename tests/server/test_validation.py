import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.engine.messages import SamplingParams
from trunkline.engine.validation import Limits, RequestError, parse_sampling_params, shown

LIMITS = Limits(vocab_size=100, context_length=64)


def parse(raw: Any, **defaults: Any) -> SamplingParams:
    return parse_sampling_params(raw, limits=LIMITS, defaults=defaults).sampling


def test_nothing_gives_the_defaults():
    assert parse(None) == SamplingParams()
    assert parse({}) == SamplingParams()
    assert parse({"temperature": None, "stop": None, "n": None, "regex": None}) == SamplingParams()


def test_a_null_length_means_as_much_as_fits():
    assert parse({}).max_new_tokens == 128
    assert parse({"max_new_tokens": None}).max_new_tokens is None
    assert parse({"max_new_tokens": None}, max_new_tokens=7).max_new_tokens is None
    assert parse({}, max_new_tokens=7).max_new_tokens == 7


@pytest.mark.parametrize(
    ("raw", "field", "value"),
    [
        ({"temperature": 0}, "temperature", 0.0),
        ({"temperature": 1e-7}, "temperature", 0.0),
        ({"temperature": 1e-5}, "temperature", 1e-5),
        ({"top_k": -1}, "top_k", 0),
        ({"top_k": 5}, "top_k", 5),
        ({"top_p": 1}, "top_p", 1.0),
        ({"min_p": 0}, "min_p", 0.0),
        ({"stop": "x"}, "stop", ["x"]),
        ({"stop": []}, "stop", []),
        ({"stop": ["x", "yy"]}, "stop", ["x", "yy"]),
        ({"stop_token_ids": [3, 99]}, "stop_token_ids", [3, 99]),
        ({"logit_bias": {"5": 1, "2": -0.5}}, "logit_bias", [(2, -0.5), (5, 1.0)]),
        ({"logit_bias": {}}, "logit_bias", []),
        ({"seed": -1}, "seed", 2**64 - 1),
        ({"sampling_seed": 7}, "seed", 7),
        ({"seed": -(2**63)}, "seed", 2**63),
        ({"max_new_tokens": 0}, "max_new_tokens", 0),
        ({"min_new_tokens": 3}, "min_new_tokens", 3),
        ({"ignore_eos": True}, "ignore_eos", True),
        ({"beam_width": 1, "stop_regex": []}, "n", None),
    ],
)
def test_accepts(raw: dict[str, Any], field: str, value: Any):
    assert getattr(parse(raw), field, None) == value


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            {"temperature": math.nan},
            "temperature must be a non-negative finite number, got nan.",
        ),
        ({"temperature": -1}, "temperature must be a non-negative finite number, got -1."),
        ({"temperature": "0.7"}, "temperature must be a non-negative finite number, got '0.7'."),
        ({"temperature": True}, "temperature must be a non-negative finite number, got True."),
        ({"temperature": math.inf}, "temperature must be a non-negative finite number, got inf."),
        ({"temperature": 1e39}, "temperature must be a non-negative finite number, got 1e+39."),
        ({"top_p": 0}, "top_p must be in (0, 1], got 0."),
        ({"top_p": 2}, "top_p must be in (0, 1], got 2."),
        ({"min_p": 1.5}, "min_p must be in [0, 1], got 1.5."),
        ({"stop": ["a", "\ud800"]}, "stop must be Unicode text, got '\\ud800'."),
        ({"stop_regex": "\udfff+"}, "stop_regex must be Unicode text, got '\\udfff+'."),
        ({"stop_regex": ""}, "stop_regex strings must have 1 to 256 characters, got one of 0."),
        ({"top_k": 0}, "top_k must be -1 (disable) or in [1, 2147483647], got 0."),
        ({"top_k": -2}, "top_k must be -1 (disable) or in [1, 2147483647], got -2."),
        ({"top_k": 1.5}, "top_k must be -1 (disable) or in [1, 2147483647], got 1.5."),
        ({"frequency_penalty": 2.1}, "frequency_penalty must be in [-2, 2], got 2.1."),
        ({"presence_penalty": -3}, "presence_penalty must be in [-2, 2], got -3."),
        ({"repetition_penalty": 0}, "repetition_penalty must be in [0.000001, 2], got 0."),
        (
            {"repetition_penalty": 1e-300},
            "repetition_penalty must be in [0.000001, 2], got 1e-300.",
        ),
        (
            {"stream_interval": 2**31},
            "stream_interval must be an integer in [1, 2147483647], got 2147483648.",
        ),
        ({"max_new_tokens": -1}, "max_new_tokens must be an integer in [0, 2147483647], got -1."),
        (
            {"min_new_tokens": 9, "max_new_tokens": 8},
            "min_new_tokens must be in [0, max_new_tokens(8)], got 9.",
        ),
        ({"n": 0}, "n must be an integer in [1, 128], got 0."),
        ({"n": 10**12}, "n must be an integer in [1, 128], got 1000000000000."),
        ({"n": True}, "n must be an integer in [1, 128], got True."),
        ({"seed": 2**63}, "seed must be a 64-bit integer, got 9223372036854775808."),
        ({"seed": "a"}, "seed must be a 64-bit integer, got 'a'."),
        ({"seed": 1.0}, "seed must be a 64-bit integer, got 1.0."),
        ({"stop": ""}, "stop strings must have 1 to 1024 characters, got one of 0."),
        ({"stop": ["x", ""]}, "stop strings must have 1 to 1024 characters, got one of 0."),
        ({"stop": ["x"] * 33}, "stop must have at most 32 strings, got 33."),
        ({"stop": 5}, "stop must be a string or a list of strings, got 5."),
        ({"stop_token_ids": [100]}, "stop_token_ids must hold token ids in [0, 100), got 100."),
        ({"stop_token_ids": [True]}, "stop_token_ids must hold token ids in [0, 100), got True."),
        ({"logit_bias": {"100": 1}}, "logit_bias keys must be token ids in [0, 100), got '100'."),
        ({"logit_bias": {"-1": 1}}, "logit_bias keys must be token ids in [0, 100), got '-1'."),
        ({"logit_bias": {"a": 1}}, "logit_bias keys must be token ids in [0, 100), got 'a'."),
        ({"logit_bias": {"5": 1e9}}, "logit_bias values must be in [-100, 100], got 1000000000.0."),
        ({"logit_bias": [1]}, "logit_bias must be an object of token id to number, got [1]."),
        ({"ignore_eos": 1}, "ignore_eos must be true or false, got 1."),
        (
            {"max_tokens": 1},
            "unknown sampling parameter 'max_tokens'; did you mean max_new_tokens?",
        ),
        ({"banana": None}, "unknown sampling parameter 'banana'."),
        ({"stop_strs": ["x"]}, "unknown sampling parameter 'stop_strs'."),
        ([1], "sampling_params must be an object, got [1]."),
        (
            {"regex": "a|b", "ebnf": "root ::= root"},
            "only one of json_schema, regex, ebnf, structural_tag may be given, got regex and "
            "ebnf.",
        ),
        (
            {"beam_width": 2},
            "beam_width is not supported by this server: it may only be null or 1, got 2.",
        ),
    ],
)
def test_refuses_with_field_value_and_limit(raw: Any, message: str):
    with pytest.raises(RequestError) as caught:
        parse(raw)
    assert caught.value.message == message
    assert caught.value.status == 400
    assert caught.value.param is not None


def test_errors_use_the_names_of_the_client():
    with pytest.raises(RequestError) as caught:
        parse_sampling_params(
            {"max_new_tokens": -1},
            limits=LIMITS,
            defaults={},
            names={"max_new_tokens": "max_tokens"},
        )
    assert caught.value.param == "max_tokens"


def test_shown_values_are_short():
    with pytest.raises(RequestError) as caught:
        parse({"temperature": "x" * 10_000})
    assert len(caught.value.message) < 200


def test_seeds_come_from_the_rid_unless_given():
    given = parse_sampling_params({"seed": 5}, limits=LIMITS, defaults={})
    assert given.for_request("a", 1).seed == given.for_request("b", 2).seed == 5
    derived = parse_sampling_params({}, limits=LIMITS, defaults={})
    seeds = {derived.for_request(rid, random).seed for rid in "ab" for random in (1, 2)}
    assert len(seeds) == 4
    assert derived.for_request("a", 1) == derived.for_request("a", 1)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["", "x", "5"])
ANYTHING = (
    SCALARS
    | st.lists(SCALARS, max_size=3)
    | st.dictionaries(st.sampled_from(["5", "-1", "a", ""]), SCALARS, max_size=2)
)
NAMES = st.sampled_from(
    "temperature top_p top_k min_p n seed stop stop_token_ids logit_bias max_new_tokens "
    "min_new_tokens ignore_eos repetition_penalty regex".split()
)


@given(st.dictionaries(NAMES, ANYTHING, max_size=4))
def test_anything_is_accepted_or_refused(raw: dict[str, Any]):
    try:
        parsed = parse_sampling_params(raw, limits=LIMITS, defaults={})
    except RequestError:
        return
    sampling = parsed.sampling
    assert 0 <= sampling.seed < 2**64
    assert math.isfinite(sampling.temperature)
    assert all(0 <= token < 100 and math.isfinite(bias) for token, bias in sampling.logit_bias)


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (nested(100_000), "[[[Ellipsis]]]"),
        ({"a": [{"b": {}}]}, "{'a': [{'b': {}}]}"),
        (10**5000, "a value of type int"),
        (["x" * 1000] * 1_000_000, f"['{'x' * 78}..."),
        (1.5, "1.5"),
    ],
    ids=["deep", "nested", "digits", "long", "float"],
)
def test_any_value_can_be_shown(value: Any, text: str):
    assert shown(value) == text
