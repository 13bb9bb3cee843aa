"""Settings of the server: the engine's, plus what HTTP, API and logs need.

As in `engine/config.py`, each field's metadata holds its help text, of which `arguments.py` makes
flags. `env` names the environment variable that supplies a value: all of the server's are here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trunkline.engine.config import EngineConfig, setting
from trunkline.server.openai.parsers import AUTO, REASONING_PARSER_NAMES, TOOL_PARSER_NAMES


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """The HTTP server."""

    host: str = setting("127.0.0.1", "address to listen on", env="TRUNKLINE_HOST")
    port: int = setting(
        30000,
        "port to listen on; 0 takes a free one",
        env="TRUNKLINE_PORT",
        minimum=0,
        maximum=65535,
    )
    api_workers: int = setting(
        1,
        "HTTP processes on the port: more, where one core cannot write as fast as the engines "
        "generate; files, batches and /v1/responses stay in the first",
        minimum=1,
        maximum=64,
    )
    api_key: tuple[str, ...] = setting(
        (),
        "clients must send one of them, as a bearer token or in x-api-key (not to /health, "
        "/ready, /metrics and /docs)",
        env="TRUNKLINE_API_KEY",
        secret=True,
        minimum=1,
    )
    api_key_file: str | None = setting(
        None, "file with further API keys, one per line; lines that begin with # are comments"
    )
    admin_api_key: str | None = setting(
        None,
        "endpoints of operators (/server_info, /flush_cache, /abort_request) take this key alone",
        env="TRUNKLINE_ADMIN_API_KEY",
        secret=True,
    )
    allowed_origins: tuple[str, ...] = setting(
        ("*",), "origins of web pages that may call (CORS); '' for none"
    )
    ssl_certfile: str | None = setting(None, "TLS certificate chain, PEM; with --ssl-keyfile")
    ssl_keyfile: str | None = setting(None, "private key of the TLS certificate, PEM")
    ssl_keyfile_password: str | None = setting(
        None, "password of the private key", env="TRUNKLINE_SSL_KEYFILE_PASSWORD", secret=True
    )
    ssl_ca_certs: str | None = setting(
        None, "PEM file of authorities: clients must show a certificate that one of them signed"
    )
    enable_ssl_refresh: bool = setting(
        False, "read certificate and key again when their files change"
    )
    max_body_bytes: int = setting(32 << 20, "largest request body; beyond it: 413", minimum=1)
    keep_alive_timeout_s: float = setting(
        65.0, "seconds after which an idle connection is closed", minimum=0
    )
    shutdown_grace_s: float = setting(
        30.0, "seconds that requests in flight get to finish after SIGTERM or SIGINT", minimum=0
    )
    skip_server_warmup: bool = setting(False, "do not send a first request to itself at start")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiOptions:
    """Behaviour of the endpoints."""

    sampling_defaults: str = setting(
        "model",
        "default sampling of the OpenAI endpoints: the model's generation_config.json, or OpenAI's",
        choices=("model", "openai"),
    )
    preferred_sampling_params: str = setting(
        "{}", "JSON object of sampling parameters (native names) for what requests leave out"
    )
    strict_fields: bool = setting(
        False, "unknown or ineffective fields of a body are a 400, not named as ignored"
    )
    tool_call_parser: str = setting(
        AUTO,
        "how the model writes tool calls; auto: as its chat template does; none: they stay text",
        choices=TOOL_PARSER_NAMES,
    )
    reasoning_parser: str = setting(
        AUTO,
        "how the model marks its reasoning; auto: as its chat template does; none: it stays text",
        choices=REASONING_PARSER_NAMES,
    )
    incremental_streaming_output: bool = setting(
        False, "/generate streams what is new in each chunk, not all so far"
    )
    stream_response_default_include_usage: bool = setting(
        False, "OpenAI streams end with a usage chunk even if not asked to"
    )
    response_store_bytes: int = setting(
        64 << 20,
        "memory for responses of /v1/responses that can be asked for later; 0 stores none",
        minimum=0,
    )
    load_header: bool = setting(
        True,
        "responses tell how busy the engine is (x-trunkline-load, for routers); default: on, "
        "--no-load-header turns it off",
    )
    metrics_sglang_names: bool = setting(
        False, "/metrics also has the metrics under their sglang: names"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """Files and batches."""

    file_storage_path: str | None = setting(
        None,
        "directory of files and batches, for one model; default: one for each model below "
        "$XDG_DATA_HOME/trunkline/storage (~/.local/share/trunkline/storage)",
    )
    max_file_bytes: int = setting(200 << 20, "largest file; beyond it: 413", minimum=1)
    batch_concurrency: int | None = setting(
        None,
        "most sequences that batches have in flight (a quarter of it while other requests run); "
        "default: a quarter of --max-running-requests, at most 64, on a CPU 16",
        minimum=1,
    )
    batch_choices_object: bool = setting(
        False, "in answers of batches a single choice is an object, not a list of one"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """Logs of the server."""

    log_level_http: str | None = setting(
        None,
        "level of the access log; default: --log-level",
        choices=("debug", "info", "warning", "error", "critical"),
    )
    access_log_exclude_prefixes: tuple[str, ...] = setting(
        (), "no access lines for paths that begin so, such as /health"
    )
    log_requests: bool = setting(False, "log each request when it comes and when it is done")
    log_requests_level: int = setting(
        2,
        "0: ids and counts; 1: and sampling parameters, without stop strings; "
        "2: and up to 2,048 characters of each text; 3: all text",
        choices=(0, 1, 2, 3),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """All settings of `engine-serve`."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    http: HttpOptions = field(default_factory=HttpOptions)
    api: ApiOptions = field(default_factory=ApiOptions)
    batches: BatchOptions = field(default_factory=BatchOptions)
    logs: LogOptions = field(default_factory=LogOptions)
