"""Sampling parameters as clients write them -> `messages.SamplingParams`.

Knows the native names, their ranges and the words of the errors; knows nothing of HTTP, requests or
models. Every rule here is stated in `docs/api.md`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import msgspec

from trunkline.engine.grammar.parameters import KINDS, Wrong, grammar_of
from trunkline.engine.messages import GrammarSpec, SamplingParams
from trunkline.engine.suggestions import did_you_mean

logger = logging.getLogger(__name__)

# Below this temperature the distribution is a point: decoding is greedy.
GREEDY_TEMPERATURE: Final = 1e-6
MAX_FLOAT32: Final = 3.4028234663852886e38  # the engine computes in 32-bit floats
MIN_REPETITION_PENALTY: Final = 1e-6  # a logit that is divided by it stays finite
MAX_LOGIT_BIAS: Final = 100.0
_SHOWN_CHARS: Final = 80
_SHOWN_DEPTH: Final = 3  # of lists and objects; what lies deeper shows as "Ellipsis"
_SHOWN_ENTRIES: Final = 27  # more would not fit


class RequestError(Exception):
    """A request cannot be served as it is; the message names field, value and limit.

    `status` is the HTTP status that fits, `param` the field in the client's spelling.
    """

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on what one request may ask for; those without a default come from the model."""

    vocab_size: int
    context_length: int
    hidden_size: int | None = None  # elements of an embedding; None: not known
    max_samples: int = 128
    max_prompts: int = 2048
    max_embedded_tokens: int = 300_000  # of all prompts of one body, or one context if longer
    max_stop_strings: int = 32
    max_stop_chars: int = 1024
    max_stop_patterns: int = 32
    max_pattern_chars: int = 256
    max_patterns_chars: int = 1024  # of all patterns together: compiling them takes time
    max_stop_token_ids: int = 256
    max_logit_bias: int = 1024
    max_top_logprobs: int = 128
    max_scored_ids: int = 1024
    max_id_chars: int = 256
    max_namespace_chars: int = 1024
    max_grammar_chars: int = 1 << 18


@dataclass(frozen=True, slots=True)
class ParsedSampling:
    """Validated sampling parameters; `seed` is None when the client gave none."""

    sampling: SamplingParams
    n: int
    stream_interval: int | None
    seed: int | None
    grammar: GrammarSpec | None = None

    def for_request(self, rid: str, random_seed: int) -> SamplingParams:
        """Give the parameters their seed: the client's, or one that depends on `rid` alone.

        The derived seed is a SHA-256 of `random_seed` and `rid`, so a rid repeats its tokens on a
        server with the same `--random-seed`.
        """
        if self.seed is not None:
            return self.sampling
        digest = hashlib.sha256(f"{random_seed}:{rid}".encode()).digest()
        return msgspec.structs.replace(self.sampling, seed=int.from_bytes(digest[:8], "little"))


def shown(value: object) -> str:
    """`value` for an error message: short, printable, never failing."""
    try:
        text = repr(_cut(value, _SHOWN_DEPTH))
    except Exception:  # of a caller's own type, or an integer of thousands of digits
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def _cut(value: Any, depth: int) -> Any:
    """As much of `value` as `shown` may show, so that its cost does not depend on the client."""
    match value:
        case str():
            return value[: _SHOWN_CHARS + 1]
        case list() if depth:
            return [_cut(one, depth - 1) for one in value[:_SHOWN_ENTRIES]]
        case dict() if depth:
            entries = itertools.islice(value.items(), _SHOWN_ENTRIES)
            return {_cut(key, 0): _cut(one, depth - 1) for key, one in entries}
        case list() | dict():
            return ... if value else value
    return value


def is_int(value: object) -> bool:
    """Whether `value` is an integer; JSON's true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def _finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if abs(number) <= MAX_FLOAT32 else None  # false for NaN too


@dataclass(frozen=True, slots=True)
class Number:
    """A range, `low` to `high`, and the words for it.

    `is_open`: `low` itself is out of it. `also` is one more value that is accepted.
    """

    low: float
    high: float
    words: str
    integer: bool = False
    is_open: bool = False
    also: int | None = None

    def parse(self, name: str, value: Any) -> Any:
        """The value as a number of this range.

        Raises:
            RequestError: it is none.
        """
        number = _finite(value)
        if number is None or not self._accepts(number) or (self.integer and not is_int(value)):
            raise RequestError(f"{name} must be {self.words}, got {shown(value)}.", name)
        return value if self.integer else number

    def _accepts(self, number: float) -> bool:
        above = number > self.low if self.is_open else number >= self.low
        return (above and number <= self.high) or number == self.also


_MOST: Final = 2**31 - 1
NUMBERS: Final = {
    "temperature": Number(0, MAX_FLOAT32, "a non-negative finite number"),
    "top_p": Number(0, 1, "in (0, 1]", is_open=True),
    "top_k": Number(1, _MOST, "-1 (disable) or in [1, 2147483647]", integer=True, also=-1),
    "min_p": Number(0, 1, "in [0, 1]"),
    "frequency_penalty": Number(-2, 2, "in [-2, 2]"),
    "presence_penalty": Number(-2, 2, "in [-2, 2]"),
    "repetition_penalty": Number(MIN_REPETITION_PENALTY, 2, "in [0.000001, 2]"),
    "max_new_tokens": Number(0, _MOST, "an integer in [0, 2147483647]", integer=True),
    "min_new_tokens": Number(0, _MOST, "an integer in [0, 2147483647]", integer=True),
    "stream_interval": Number(1, _MOST, "an integer in [1, 2147483647]", integer=True),
}
FLAGS: Final = ("ignore_eos", "skip_special_tokens", "no_stop_trim")
# Known elsewhere, not served here: only null, or a value that changes nothing.
UNSUPPORTED: Final[Mapping[str, tuple[object, ...]]] = {
    "beam_width": (1,),
    "custom_params": ({},),
    "watermark": ({}, False),
    "lora_path": (),
    "max_thinking_tokens": (),
    "thinking_budget": (),
    "spaces_between_special_tokens": (True,),
}


def usable_defaults(recommended: Mapping[str, Any], limits: Limits) -> dict[str, Any]:
    """What can be used of the sampling parameters that a model recommends.

    Model files are not ours to refuse: a value that no request could have is left out (and named in
    the log), and the `top_k` of 0 by which they mean "all" is understood.
    """
    usable: dict[str, Any] = {}
    for name, value in recommended.items():
        wanted = -1 if name == "top_k" and value == 0 else value
        try:
            parse_sampling_params({name: wanted}, limits=limits, defaults={})
        except RequestError as error:
            logger.warning("the model's recommended sampling is not used: %s", error.message)
        else:
            usable[name] = wanted
    return usable


@dataclass(slots=True)
class _Reader:
    """Takes the client's dict apart; `names` maps native names to the client's spelling."""

    raw: Mapping[str, Any]
    limits: Limits
    names: Mapping[str, str]
    values: dict[str, Any] = field(default_factory=dict)

    def name(self, native: str) -> str:
        return self.names.get(native, native)

    def numbers_and_flags(self) -> None:
        for native, value in self.raw.items():
            if value is None and native != "max_new_tokens":
                continue
            if native in NUMBERS:
                parsed = None if value is None else NUMBERS[native].parse(self.name(native), value)
                self.values[native] = parsed
            elif native in FLAGS:
                if not isinstance(value, bool):
                    name = self.name(native)
                    raise RequestError(f"{name} must be true or false, got {shown(value)}.", name)
                self.values[native] = value

    def strings(self, native: str, most: int, longest: int) -> list[str]:
        """A string or a list of at most `most`, each of 1 to `longest` characters."""
        value = self.raw.get(native)
        name = self.name(native)
        strings = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(strings, list) or not all(isinstance(item, str) for item in strings):
            raise RequestError(
                f"{name} must be a string or a list of strings, got {shown(value)}.", name
            )
        if len(strings) > most:
            raise RequestError(
                f"{name} must have at most {most} strings, got {len(strings)}.", name
            )
        for item in strings:
            if not 1 <= len(item) <= longest:
                raise RequestError(
                    f"{name} strings must have 1 to {longest} characters, got one of {len(item)}.",
                    name,
                )
            if any("\ud800" <= char <= "\udfff" for char in item):
                raise RequestError(f"{name} must be Unicode text, got {shown(item)}.", name)
        return list(strings)

    def stop_token_ids(self) -> list[int]:
        value = self.raw.get("stop_token_ids")
        if value is None:
            return []
        name = self.name("stop_token_ids")
        return parse_token_ids(value, name, self.limits, self.limits.max_stop_token_ids)

    def logit_bias(self) -> list[tuple[int, float]]:
        value = self.raw.get("logit_bias")
        name = self.name("logit_bias")
        if value is None:
            return []
        if not isinstance(value, dict):
            raise RequestError(
                f"{name} must be an object of token id to number, got {shown(value)}.", name
            )
        if len(value) > self.limits.max_logit_bias:
            raise RequestError(
                f"{name} must have at most {self.limits.max_logit_bias} entries, got {len(value)}.",
                name,
            )
        return sorted(self._bias_entry(name, key, bias) for key, bias in value.items())

    def _bias_entry(self, name: str, key: Any, bias: Any) -> tuple[int, float]:
        token = key if is_int(key) else int(key) if _is_decimal(key) else -1
        if not 0 <= token < self.limits.vocab_size:
            raise RequestError(
                f"{name} keys must be token ids in [0, {self.limits.vocab_size}), "
                f"got {shown(key)}.",
                name,
            )
        number = _finite(bias)
        if number is None or abs(number) > MAX_LOGIT_BIAS:
            bound = int(MAX_LOGIT_BIAS)
            raise RequestError(
                f"{name} values must be in [-{bound}, {bound}], got {shown(bias)}.", name
            )
        return token, number

    def seed(self) -> int | None:
        native = "sampling_seed" if self.raw.get("sampling_seed") is not None else "seed"
        value = self.raw.get(native)
        if value is None:
            return None
        if not is_int(value) or not -(2**63) <= value < 2**63:
            name = self.name(native)
            raise RequestError(f"{name} must be a 64-bit integer, got {shown(value)}.", name)
        return int(value) % 2**64

    def samples(self) -> int:
        value = self.raw.get("n")
        if value is None:
            return 1
        if not is_int(value) or not 1 <= value <= self.limits.max_samples:
            raise RequestError(
                f"n must be an integer in [1, {self.limits.max_samples}], got {shown(value)}.", "n"
            )
        return int(value)


_OTHERS: Final = (
    "stop",
    "stop_regex",
    "stop_token_ids",
    "logit_bias",
    "sampling_seed",
    "seed",
    "n",
)
SAMPLING_NAMES: Final = frozenset((*NUMBERS, *FLAGS, *_OTHERS, *KINDS))


def _is_decimal(key: object) -> bool:
    return isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10


def parse_token_ids(value: Any, name: str, limits: Limits, most: int) -> list[int]:
    """Check a list of at most `most` token ids.

    Raises:
        RequestError: it is no list, too long, or an entry is not an id of the vocabulary.
    """
    if not isinstance(value, list):
        raise RequestError(f"{name} must be a list of token ids, got {shown(value)}.", name)
    if len(value) > most:
        raise RequestError(f"{name} must have at most {most} token ids, got {len(value)}.", name)
    for token in value:
        if not is_int(token) or not 0 <= token < limits.vocab_size:
            raise RequestError(
                f"{name} must hold token ids in [0, {limits.vocab_size}), got {shown(token)}.",
                name,
            )
    return value


def refuse_unsupported(
    raw: Mapping[str, Any],
    table: Mapping[str, tuple[object, ...]],
    instead: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Refuse the fields of `table` unless null or one of their neutral values.

    `instead` names the fields that do what some of them are for.

    Raises:
        RequestError: a field has a value that would have an effect if it were supported.
    """
    for name, neutral in table.items():
        value = raw.get(name)
        if value is None or any(type(value) is type(x) and value == x for x in neutral):
            continue
        if name in instead:
            raise RequestError(f"{name} is not supported: use {instead[name]}.", name)
        only = " or ".join(["null", *(json.dumps(one) for one in neutral)])
        raise RequestError(
            f"{name} is not supported by this server: it may only be {only}, got {shown(value)}.",
            name,
        )


def parse_sampling_params(
    raw: Any,
    *,
    limits: Limits,
    defaults: Mapping[str, Any],
    names: Mapping[str, str] | None = None,
) -> ParsedSampling:
    """Validate a dict of sampling parameters.

    Args:
        raw: what the client sent, by native names; null values stand for the default, except
            `max_new_tokens`, whose null means as many as the context holds.
        limits: bounds of this server.
        defaults: values by native name for what `raw` leaves out; trusted to be valid.
        names: native name -> the client's spelling, for error messages.

    Raises:
        RequestError: a value is out of range or of the wrong type, a key unknown or unsupported.
    """
    if raw is None:
        raw = {}
    if not isinstance(raw, Mapping):
        raise RequestError(
            f"sampling_params must be an object, got {shown(raw)}.", "sampling_params"
        )
    unknown = [key for key in raw if key not in SAMPLING_NAMES and key not in UNSUPPORTED]
    if unknown:
        end = did_you_mean(str(unknown[0]), SAMPLING_NAMES) or "."
        raise RequestError(f"unknown sampling parameter {shown(unknown[0])}{end}", unknown[0])
    refuse_unsupported(raw, UNSUPPORTED)
    given = {
        key: value for key, value in raw.items() if value is not None or key == "max_new_tokens"
    }
    merged = {**defaults, **given}
    reader = _Reader(merged, limits, names or {})
    reader.numbers_and_flags()
    sampling, interval = _assemble(reader)
    seed = reader.seed()
    if seed is not None:
        sampling = msgspec.structs.replace(sampling, seed=seed)
    grammar = grammar_of(merged, limits.max_grammar_chars)
    if isinstance(grammar, Wrong):
        raise RequestError(grammar.message, grammar.name)
    return ParsedSampling(sampling, reader.samples(), interval, seed, grammar)


def _assemble(reader: _Reader) -> tuple[SamplingParams, int | None]:
    values, limits = reader.values, reader.limits
    interval = values.pop("stream_interval", None)
    if values.get("top_k") == -1:
        values["top_k"] = 0
    if values.get("temperature", 1.0) < GREEDY_TEMPERATURE:
        values["temperature"] = 0.0
    sampling = SamplingParams(
        stop=reader.strings("stop", limits.max_stop_strings, limits.max_stop_chars),
        stop_regex=reader.strings("stop_regex", limits.max_stop_patterns, limits.max_pattern_chars),
        stop_token_ids=reader.stop_token_ids(),
        logit_bias=reader.logit_bias(),
        **values,
    )
    pattern_chars = sum(len(pattern) for pattern in sampling.stop_regex)
    if pattern_chars > limits.max_patterns_chars:
        raise RequestError(
            f"stop_regex must have at most {limits.max_patterns_chars} characters in all, "
            f"got {pattern_chars}.",
            "stop_regex",
        )
    longest = sampling.max_new_tokens
    if longest is not None and sampling.min_new_tokens > longest:
        name = reader.name("min_new_tokens")
        raise RequestError(
            f"{name} must be in [0, {reader.name('max_new_tokens')}({longest})], "
            f"got {sampling.min_new_tokens}.",
            name,
        )
    return sampling, interval
