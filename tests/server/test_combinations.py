"""Settings that contradict each other, and those that change nothing beside others."""

from __future__ import annotations

import signal
from contextlib import nullcontext
from pathlib import Path

import pytest
from tests.server.fake_engine import ByteTokenizer
from tests.server.live import TEMPLATE

from trunkline.engine.chat_template import ChatTemplate, TemplateSource
from trunkline.engine.fleet import METHODS, balance_method
from trunkline.engine.validation import RequestError
from trunkline.server.arguments import UsageError, parse_arguments
from trunkline.server.cli import main
from trunkline.server.combinations import without_effect
from trunkline.server.config import ServerConfig
from trunkline.server.openai.parsers import Parsers

LEVEL = "log_requests_level has no effect: log_requests is not given"


def configured(*words: str) -> ServerConfig:
    config, warnings = parse_arguments(words, {})
    assert warnings == []
    return config


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        ([], []),
        (
            ["--load-balance-method", "round_robin"],
            ["load_balance_method has no effect: there is one engine (dp_size is 1)"],
        ),
        (["--load-balance-method", "round_robin", "--dp-size", "2"], []),
        (["--log-requests-level", "3"], [LEVEL]),
        (["--log-requests-level", "3", "--log-requests"], []),
        (
            ["--log-requests", "--log-level", "error"],
            ["log_requests has no effect: log_level 'error' leaves its lines out"],
        ),
        (
            ["--access-log-exclude-prefixes", "/health", "--log-level-http", "warning"],
            [
                "access_log_exclude_prefixes has no effect: log_level_http 'warning' leaves all "
                "access lines out"
            ],
        ),
        (
            ["--access-log-exclude-prefixes", "/health", "--log-level", "warning"],
            [
                "access_log_exclude_prefixes has no effect: log_level 'warning' leaves all access "
                "lines out"
            ],
        ),
        (
            [
                *("--access-log-exclude-prefixes", "/health"),
                *("--log-level", "warning", "--log-level-http", "info"),
            ],
            [],
        ),
    ],
)
def test_what_changes_nothing_is_named(words: list[str], lines: list[str]):
    assert without_effect(configured(*words)) == lines


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--dp-size", "2", "--load-balance-method", "cache_aware", "--disable-radix-cache"],
            "--load-balance-method cache_aware goes by what the engines have cached",
        ),
        (
            ["--enable-priority-scheduling", "--schedule-policy", "lpm"],
            "--enable-priority-scheduling contradicts --schedule-policy lpm",
        ),
    ],
)
def test_contradictions_are_refused(words: list[str], message: str):
    with pytest.raises(UsageError) as caught:
        parse_arguments(words, {})
    assert message in str(caught.value)


def test_the_same_twice_is_no_contradiction():
    words = ["--enable-priority-scheduling", "--schedule-policy", "priority"]
    assert configured(*words).engine.scheduler.schedule_policy == "priority"


def test_a_flag_goes_before_the_file_under_either_name(tmp_path: Path):
    file = tmp_path / "server.yaml"
    file.write_text("enable_priority_scheduling: true\n")
    config = configured("--config", str(file), "--schedule-policy", "lpm")
    assert config.engine.scheduler.schedule_policy == "lpm"
    file.write_text("schedule_policy: lpm\n")
    config = configured("--config", str(file), "--enable-priority-scheduling")
    assert config.engine.scheduler.schedule_policy == "priority"


def test_ranks_without_caches_are_not_chosen_by_them():
    def method(*words: str) -> str:
        return METHODS[balance_method(configured("--dp-size", "2", *words).engine)]

    assert method() == "cache_aware"
    assert method("--disable-radix-cache") == "least_load"
    other = ("--disable-radix-cache", "--load-balance-method", "round_robin")
    assert method(*other) == "round_robin"


def test_the_log_names_them(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr("trunkline.server.logs.configure", lambda *_: None)
    words = ["--log-requests-level", "1", "--model-path", "/nowhere", "--port", "0"]
    handlers = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert main(words) == 1
    finally:
        for one, handler in handlers.items():
            signal.signal(one, handler)
    assert LEVEL in caplog.messages


@pytest.mark.parametrize(
    ("tools", "reasoning", "refused"),
    [
        ("gpt-oss", "auto", None),
        ("auto", "gpt-oss", None),
        ("gpt-oss", "gpt-oss", None),
        ("hermes", "gpt-oss", "--tool-call-parser is hermes"),
        ("none", "gpt-oss", "--tool-call-parser is none"),
        ("gpt-oss", "qwen3", "--reasoning-parser is qwen3"),
    ],
)
def test_the_parser_of_calls_and_reasoning_is_alone(
    tools: str, reasoning: str, refused: str | None
):
    template = ChatTemplate(TemplateSource({"default": TEMPLATE}, "test"), {})
    with pytest.raises(RequestError, match=refused) if refused else nullcontext():
        assert Parsers.of(tools, reasoning, template, ByteTokenizer()).is_harmony
