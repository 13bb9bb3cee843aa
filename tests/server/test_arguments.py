import dataclasses
from pathlib import Path
from typing import Any

import pytest

import trunkline
from trunkline.engine.config import flat_settings, settings_line
from trunkline.server.arguments import (
    UsageError,
    build_parser,
    parse_arguments,
)
from trunkline.server.cli import main, with_random_seed
from trunkline.server.config import ServerConfig


def parse(*words: str, environment: dict[str, str] | None = None) -> dict[str, object]:
    """The settings by flat names; the secret one shown."""
    config, _ = parse_arguments(words, environment or {})
    return {**flat_settings(config), "api_key": config.http.api_key}


# Every field of the reference's argument dump: words -> the setting, a warning, or a refusal.
ACCEPTED = [
    (["--model-path", "m"], "model_path", "m"),
    (["--model", "m"], "model_path", "m"),
    (["--tokenizer-path", "t"], "tokenizer_path", "t"),
    (["--load-format", "dummy"], "load_format", "dummy"),
    (["--dtype", "half"], "dtype", "half"),
    (["--context-length", "4096"], "context_length", 4096),
    (["--device", "cpu"], "device", "cpu"),
    (["--served-model-name", "s"], "served_model_name", "s"),
    (["--chat-template", "f.jinja"], "chat_template", "f.jinja"),
    (["--revision", "r"], "revision", "r"),
    (["--host", "0.0.0.0"], "host", "0.0.0.0"),
    (["--port", "30001"], "port", 30001),
    (["--mem-fraction-static", "0.5"], "mem_fraction_static", 0.5),
    (["--max-running-requests", "8"], "max_running_requests", 8),
    (["--max-total-tokens", "1024"], "max_total_tokens", 1024),
    (["--chunked-prefill-size", "-1"], "chunked_prefill_size", -1),
    (["--max-prefill-tokens", "512"], "max_prefill_tokens", 512),
    (["--schedule-policy", "lpm"], "schedule_policy", "lpm"),
    (["--enable-priority-scheduling"], "schedule_policy", "priority"),
    (["--schedule-conservativeness", "0.3"], "schedule_conservativeness", 0.3),
    (["--stream-interval", "4"], "stream_interval", 4),
    (["--random-seed", "7"], "random_seed", 7),
    (["--watchdog-timeout", "60"], "watchdog_timeout", 60.0),
    (["--download-dir", "d"], "download_dir", "d"),
    (["--log-level", "error"], "log_level", "error"),
    (["--log-level-http", "warning"], "log_level_http", "warning"),
    (["--log-requests"], "log_requests", True),
    (["--log-requests-level", "3"], "log_requests_level", 3),
    (["--decode-log-interval", "10"], "decode_log_interval", 10),
    (["--api-key", "k,l", "--api-key", "m"], "api_key", ("k", "l", "m")),
    (["--api-key", '["k", "l"]'], "api_key", ("k", "l")),
    (["--allowed-origins", ""], "allowed_origins", ()),
    (["--file-storage-path", "/x"], "file_storage_path", "/x"),
    (["--file-storage-pth", "SGLang_storage"], "file_storage_path", "SGLang_storage"),
    (["--max-file-bytes", "9"], "max_file_bytes", 9),
    (["--batch-concurrency", "3"], "batch_concurrency", 3),
    (["--batch-choices-object"], "batch_choices_object", True),
    (["--json-model-override-args", '{"a": 1}'], "json_model_override_args", '{"a": 1}'),
    (["--disable-radix-cache"], "disable_radix_cache", True),
    (["--disable-overlap-schedule"], "disable_overlap_schedule", True),
    (["--no-disable-radix-cache"], "disable_radix_cache", False),
    (["--page-size", "1"], "page_size", 1),
    (["--max-queued-requests", "5"], "max_queued_requests", 5),
    (["--preferred-sampling-params", "{}"], "preferred_sampling_params", "{}"),
    (["--weight-version", "v2"], "weight_version", "v2"),
    (["--dp-size", "2"], "dp_size", 2),
    (["--data-parallel-size", "3"], "dp_size", 3),
    (["--load-balance-method", "shortest_queue"], "load_balance_method", "shortest_queue"),
    (["--attention-backend", "torch_native"], "attention_backend", "torch_native"),
    (["--attention-backend", "flashinfer"], "attention_backend", "flashinfer"),
    (["--kv-cache-dtype", "fp8_e4m3"], "kv_cache_dtype", "fp8_e4m3"),
    (["--quantization", "fp8"], "quantization", "fp8"),
    (["--enable-deterministic-inference"], "enable_deterministic_inference", True),
    (["--disable-cuda-graph"], "disable_cuda_graph", True),
    (["--cuda-graph-max-bs", "160"], "cuda_graph_max_bs", 160),
]
FINE = [
    ["--tokenizer-mode", "auto"],
    ["--kv-cache-dtype", "auto"],
    ["--tp-size", "1"],
    ["--tp", "1"],
    ["--dp-size", "1"],
    ["--nnodes", "1", "--node-rank", "0"],
    ["--cpu-offload-gb", "0"],
    ["--base-gpu-id", "0"],
    ["--load-balance-method", "auto"],
    ["--attention-backend", "auto"],
    ["--sampling-backend", "pytorch"],
    ["--max-loras-per-batch", "8"],
    ["--torch-compile-max-bs", "32"],
    ["--num-continuous-decode-steps", "1"],
    ["--enable-metrics"],
    ["--enable-http2"],
    ["--enable-cache-report"],
    ["--enable-mixed-chunk"],
    ["--disable-custom-all-reduce"],
    ["--enable-nan-detection"],
    ["--triton-attention-reduce-in-fp32"],
]
WARNED = [
    ["--trust-remote-code"],
    ["--is-embedding"],
    ["--disable-cuda-graph-padding"],
    ["--enable-p2p-check"],
    ["--num-continuous-decode-steps", "4"],
    ["--disable-outlines-disk-cache"],
    ["--disable-mla"],
    ["--torchao-config", "int8wo"],
    ["--enable-double-sparsity"],
    ["--ds-channel-config-path", "x"],
    ["--ds-heavy-channel-num", "32"],
    ["--ds-heavy-token-num", "256"],
    ["--ds-heavy-channel-type", "qk"],
    ["--ds-sparse-decode-threshold", "4096"],
    ["--enable-overlap-schedule"],
    ["--disable-flashinfer"],
    ["--disable-flashinfer-sampling"],
    ["--disable-disk-cache"],
]
REFUSED = [
    (["--tp-size", "2"], "--tp-size 2 is not supported: tensor parallelism"),
    (["--tensor-parallel-size", "2"], "--tp-size 2 is not supported"),
    (["--dp", "0"], "must be at least 1"),
    (["--load-balance-method", "follow_bootstrap_room"], "invalid choice"),
    (["--api-workers", "0"], "must be at least 1"),
    (["--nnodes", "2"], "--nnodes 2 is not supported"),
    (["--nccl-init-addr", "h:1"], "--dist-init-addr h:1 is not supported"),
    (["--tokenizer-mode", "slow"], "only fast tokenizers"),
    (["--skip-tokenizer-init"], "--skip-tokenizer-init is not supported"),
    (["--kv-cache-dtype", "fp8_e5m2"], "invalid choice: 'fp8_e5m2'"),
    (["--quantization", "awq"], "invalid choice: 'awq'"),
    (["--base-gpu-id", "1"], "CUDA_VISIBLE_DEVICES"),
    (["--constrained-json-whitespace-pattern", "x"], "blanks in JSON are bounded"),
    (["--lora-paths", "a=b"], "adapters are not supported yet"),
    (["--lora-paths", "a=b", "c=d"], "adapters are not supported yet"),
    (["--attention-backend", "fa4"], "invalid choice: 'fa4'"),
    (["--cuda-graph-max-bs", "0"], "must be at least 1, got 0"),
    (["--sampling-backend", "flashinfer"], "it may be auto or pytorch"),
    (["--grammar-backend", "outlines"], "xgrammar"),
    (["--enable-dp-attention"], "not supported yet"),
    (["--enable-torch-compile"], "not supported yet"),
    (["--delete-ckpt-after-loading"], "never deletes a model"),
    (["--show-time-cost"], "not supported yet"),
    (["--cpu-offload-gb", "4"], "not supported yet"),
    (["--schedule-policy", "dfs-weight"], "invalid choice: 'dfs-weight'"),
    (["--device", "xpu"], "invalid choice: 'xpu'"),
    (["--port", "x"], "invalid int value: 'x'"),
    (["--port", "65536"], "must be at most 65535, got 65536"),
    (["--preferred-sampling-params", "{a: 1}"], "--preferred-sampling-params is not valid JSON"),
    (
        ["--preferred-sampling-params", '{"max_tokens": 1}'],
        "--preferred-sampling-params: unknown sampling parameter 'max_tokens'; did you mean",
    ),
    (["--stream-interval", "0"], "must be at least 1, got 0"),
    (["--max-running-requests", "-5"], "must be at least 1, got -5"),
    (["--target-step-ms", "nan"], "must be at least 1, got nan"),
    (["--chunked-prefill-size", "-2"], "must be at least -1, got -2"),
    (["--banana"], "unrecognized arguments: --banana"),
    (["--prot", "1"], "unrecognized arguments: --prot; did you mean --port?"),
    (["serve", "m"], "unrecognized arguments: serve m; a model is given with --model-path"),
    (["--speculative-algorithm", "EAGLE"], "--speculative-algorithm EAGLE is not supported yet"),
    (["--max-run", "4"], "unrecognized arguments: --max-run"),
]


@pytest.mark.parametrize(("words", "name", "value"), ACCEPTED)
def test_settings(words: list[str], name: str, value: object):
    assert parse(*words)[name] == value


@pytest.mark.parametrize("words", FINE, ids=" ".join)
def test_fine_without_a_word(words: list[str]):
    config, warnings = parse_arguments(words, {})
    assert (config, warnings) == (ServerConfig(), [])


@pytest.mark.parametrize("words", WARNED, ids=" ".join)
def test_accepted_with_a_warning(words: list[str]):
    config, [warning] = parse_arguments(words, {})
    assert config == ServerConfig()
    assert warning.startswith(words[0])
    assert "has no effect" in warning


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_refused(words: list[str], message: str):
    with pytest.raises(UsageError) as caught:
        parse(*words)
    assert message in str(caught.value)


def test_command_line_over_environment_over_file(tmp_path: Path):
    file = tmp_path / "server.yaml"
    file.write_text(
        "port: 1\nhost: file\napi_key: file\nlog-requests: true\nmax_total_tokens: null\n"
    )
    environment = {"TRUNKLINE_PORT": "2", "TRUNKLINE_API_KEY": "environment", "OTHER": "x"}
    settings = parse("--config", str(file), "--port", "3", environment=environment)
    assert (settings["port"], settings["host"]) == (3, "file")
    assert settings["api_key"] == ("environment",)
    assert settings["log_requests"] is True
    assert settings["max_total_tokens"] is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("banana: 1", "unknown setting 'banana'"),
        ("model_pth: x", "unknown setting 'model_pth'; did you mean model-path?"),
        ("config: x", "unknown setting 'config'"),
        ("version: 1", "unknown setting 'version'"),
        ("port: 1\nport: 2", "server.yaml: 'port' is set twice"),
        ("page-size: 1\npage_size: 1", "'page_size' is set twice"),
        ("- a", "must hold settings"),
        ("a: [", "is not valid YAML"),
        ("tp_size: 2", "--tp-size 2 is not supported"),
        ("port: [1, 2]", "takes one value"),
        ("log_requests: 1", "must be true or false"),
        ("port: x", "server.yaml: argument --port: invalid int value"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, message: str):
    file = tmp_path / "server.yaml"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        parse("--config", str(file))
    assert message in str(caught.value)


def test_files_may_hold_objects_and_other_engines_flags(tmp_path: Path):
    file = tmp_path / "server.yaml"
    file.write_text("json_model_override_args: {a: 1}\nenable_metrics: true\ntp_size: 1\n")
    assert parse("--config", str(file))["json_model_override_args"] == '{"a": 1}'


def test_a_missing_file():
    with pytest.raises(UsageError, match="No such file"):
        parse("--config", "/nowhere.yaml")


def test_a_bad_environment_variable():
    with pytest.raises(UsageError, match="the environment: argument --port: invalid int value"):
        parse(environment={"TRUNKLINE_PORT": "x"})


def test_secrets_are_not_shown():
    config, _ = parse_arguments(["--api-key", "SENTINEL"], {})
    line = settings_line(config)
    assert "SENTINEL" not in line
    assert line.startswith("server_args=ServerArgs(")
    assert "api_key='***'" in line
    assert "host='127.0.0.1', port=30000" in line


def test_every_setting_has_a_flag_and_a_default():
    help_text = build_parser().format_help()
    config, warnings = parse_arguments([], {})
    assert (config, warnings) == (ServerConfig(), [])
    for name in flat_settings(config):
        assert f"--{name.replace('_', '-')}" in help_text


def fields(value: Any) -> list[str]:
    names = []
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        names += fields(inner) if dataclasses.is_dataclass(inner) else [field.name]
    return names


def test_names_are_unique_over_all_groups():
    names = fields(ServerConfig())
    assert len(names) == len(set(names))


def test_a_random_seed_is_chosen():
    chosen = with_random_seed(ServerConfig()).engine.scheduler.random_seed
    assert chosen is not None
    assert 0 <= chosen < 2**30
    kept, _ = parse_arguments(["--random-seed", "5"], {})
    assert with_random_seed(kept) == kept


def test_usage_errors_exit_with_2(capsys: pytest.CaptureFixture[str]):
    assert main(["--tp", "2"]) == 2
    assert "engine-serve: --tp-size 2 is not supported" in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    for group in ("Which model", "The HTTP server", "Queueing and batching"):
        assert group in shown


def test_the_version(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"engine-serve {trunkline.__version__}\n"
