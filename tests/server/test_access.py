"""Who may call what: keys, origins; and that no key is ever shown."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
from tests.server.live import Live

from trunkline.server.arguments import UsageError, parse_arguments, without_secrets
from trunkline.server.config import HttpOptions, ServerConfig
from trunkline.server.keys import Keys
from trunkline.server.logs import ACCESS, HYPERCORN, configure, query_without_secrets
from trunkline.server.routes import ROUTES

KEY, OTHER, ADMIN = "SENTINEL-123", "SENTINEL-456", "SENTINEL-admin"
PUBLIC = {"/health", "/ready", "/health_generate", "/metrics", "/docs", "/openapi.json"}
OPERATORS = {"/server_info", "/get_server_info", "/flush_cache", "/abort_request"}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def server(*keys: str, admin: str | None = None) -> ServerConfig:
    return ServerConfig(http=HttpOptions(api_key=keys, admin_api_key=admin))


def statuses(live: Live, headers: dict[str, str]) -> list[tuple[str, int]]:
    """Of one request of each route, with a body that is refused if it comes so far."""
    answers = []
    for route in ROUTES:
        method = sorted(route.methods or set())[-1]  # not HEAD, of which GET comes before it
        method = "GET" if method == "HEAD" else method
        path = re.sub(r"{\w+(:\w+)?}", "default", route.path)
        answers.append((route.path, live.http.request(method, path, headers=headers).status_code))
    return answers


@pytest.mark.parametrize("keys", [(), (KEY, OTHER)])
@pytest.mark.parametrize("admin", [None, ADMIN])
def test_every_route_is_guarded_by_its_class(keys: tuple[str, ...], admin: str | None):
    with Live(config=server(*keys, admin=admin)) as live:
        for given in ("", "wrong", KEY, OTHER, ADMIN):
            for path, status in statuses(live, bearer(given) if given else {}):
                if path in PUBLIC:
                    expected = None
                elif path in OPERATORS and admin:
                    expected = None if given == ADMIN else 403 if given in keys else 401
                else:
                    allowed = not keys or given in keys or given == admin
                    expected = None if allowed else 401
                refused = status if status in (401, 403) else None
                assert refused == expected, (path, given)


def test_access_classes_of_the_table():
    assert {route.path for route in ROUTES if route.access == "public"} == PUBLIC
    assert {route.path for route in ROUTES if route.access == "admin"} >= OPERATORS


def test_what_a_refusal_says():
    with Live(config=server(KEY, admin=ADMIN)) as live:
        response = live.http.get("/v1/models", headers=bearer("wrong"))
        assert response.json()["error"]["type"] == "authentication_error"
        assert response.json()["message"] == "the API key is wrong: this server needs an API key"
        assert "Authorization header" in live.http.get("/v1/models").json()["message"]
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
        assert "x-trunkline-load" not in response.headers
        refused = live.http.post("/flush_cache", headers=bearer(KEY))
        assert refused.json()["error"]["type"] == "permission_error"
        assert "--admin-api-key" in refused.json()["message"]
        for path in ("/nope", "/health/nope", "/v1/models/", "//v1/models", "/flush_cache/"):
            assert live.http.get(path, follow_redirects=True).status_code == 401, path
        assert live.http.options("/v1/models").status_code != 401


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": KEY}, 200),
        ({"x-api-key": "wrong"}, 401),
        ({"authorization": f"bearer   {KEY}"}, 200),
        ({"authorization": KEY}, 401),
        ({"authorization": f"Basic {KEY}"}, 401),
        ({"authorization": "Bearer"}, 401),
        ({"authorization": "Bearer wrong", "x-api-key": KEY}, 401),
        ({"authorization": b"Bearer \xff\xfe"}, 401),
        ({"authorization": f"Bearer {KEY},{OTHER}"}, 401),
    ],
)
def test_how_a_key_is_sent(headers: dict[str, str], status: int):
    with Live(config=server(KEY, OTHER)) as live:
        assert live.http.get("/v1/models", headers=headers).status_code == status


def test_keys_hold_no_keys():
    keys = Keys([KEY], ADMIN)
    assert KEY not in repr(vars(keys))
    assert ADMIN not in repr(vars(keys))


def test_an_unneeded_key_is_fine(live: Live):
    assert live.http.get("/v1/models", headers=bearer("None")).status_code == 200


def test_the_keys_are_shown_nowhere(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.DEBUG)
    with Live(config=server(KEY, admin=ADMIN)) as live:
        seen = [live.http.get(path, headers=bearer(ADMIN)).text for path in PUBLIC | OPERATORS]
        for key in (KEY, ADMIN, f"{KEY}x"):
            for path in ("/model_info", "/", "/nope", f"/v1/models?api_key={KEY}"):
                seen.append(live.http.get(path, headers=bearer(key)).text)
            seen.append(live.http.post("/generate", json={KEY: 1}, headers=bearer(key)).text)
    out, err = capfd.readouterr()
    ours = [
        record.getMessage() for record in caplog.records if not record.name.startswith("http")
    ]  # the client's libraries log what they send
    assert len(ours) > 20
    assert not any("SENTINEL" in text for text in [*seen, out, err, *ours])


def test_keys_in_a_query_are_not_logged(live: Live, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, logger="trunkline.access"):
        live.http.get("/v1/models?a=1&api_key=SENTINEL&access-token=SENTINEL&z=2&KEY=SENTINEL")
    [line] = [one.getMessage() for one in caplog.records if one.name == "trunkline.access"]
    assert "GET /v1/models?a=1&api_key=***&access-token=***&z=2&KEY=*** HTTP" in line


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loggers as `--access-log-exclude-prefixes /hea` makes them, for one test."""
    package = logging.getLogger("trunkline")
    for logger in (package, ACCESS, HYPERCORN):
        for name in ("level", "propagate", "handlers", "filters"):
            value = getattr(logger, name)
            monkeypatch.setattr(logger, name, list(value) if isinstance(value, list) else value)
    configure("info", None, ["/hea"])
    package.propagate = True


@pytest.mark.usefixtures("configured")
def test_paths_without_access_lines(live: Live, caplog: pytest.LogCaptureFixture):
    live.http.get("/health")
    live.http.get("/v1/models")
    lines = [one.getMessage() for one in caplog.records if one.name == "trunkline.access"]
    assert len(lines) == 1
    assert "/v1/models" in lines[0]


def test_keys_from_a_file(tmp_path: Path):
    file = tmp_path / "keys"
    file.write_text(f"# ours\n{KEY}\n\n  {OTHER}  \n")
    config, _ = parse_arguments(["--api-key-file", str(file), "--api-key", "a,b"], {})
    assert config.http.api_key == ("a", "b", KEY, OTHER)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--api-key", ""], "it is empty"),
        (["--api-key", " , "], "it is empty"),
        (["--api-key", "[1]"], "must be a JSON list of strings"),
        (["--api-key", "SENTINEL x"], "spaces or characters outside ASCII"),
        (["--admin-api-key", ""], "--admin-api-key is empty"),
        (["--admin-api-key", "SENTINEL-\u00e9"], "outside ASCII"),
        (["--api-key-file", "/nowhere"], "No such file"),
        (["--api-key-file", "EMPTY"], "holds no key"),
        (["--ssl-keyfile", "x"], "--ssl-keyfile needs --ssl-certfile"),
        (["--enable-ssl-refresh"], "--enable-ssl-refresh needs --ssl-certfile"),
        (["--ssl-certfile", "/nowhere"], "No such file"),
        (["--api-kee", "SENTINEL"], "did you mean --api-key?"),
        (["--api-kee=SENTINEL"], "did you mean --api-key?"),
    ],
)
def test_unusable_keys_and_certificates(words: list[str], message: str, tmp_path: Path):
    empty = tmp_path / "keys"
    empty.write_text("# none\n")
    with pytest.raises(UsageError) as caught:
        parse_arguments([str(empty) if word == "EMPTY" else word for word in words], {})
    assert message in str(caught.value)
    assert "SENTINEL" not in str(caught.value)


def test_an_empty_key_in_the_environment_is_an_error():
    with pytest.raises(UsageError, match="it is empty"):
        parse_arguments([], {"TRUNKLINE_API_KEY": ""})


def test_secrets_of_a_command_line_are_hidden():
    words = ["--api-key", "a", "--port", "1", "--admin-api-key=b", "--api-key-file", "f"]
    assert without_secrets(words) == [
        *("--api-key", "***", "--port", "1", "--admin-api-key=***", "--api-key-file", "f")
    ]


@pytest.mark.parametrize(
    ("origins", "allowed"),
    [
        (("*",), {"https://a.example": "*", "https://b.example": "*"}),
        (
            ("https://a.example",),
            {"https://a.example": "https://a.example", "https://b.example": None},
        ),
        ((), {"https://a.example": None}),
    ],
)
def test_which_origins_may_call(origins: tuple[str, ...], allowed: dict[str, str | None]):
    with Live(config=ServerConfig(http=HttpOptions(allowed_origins=origins))) as live:
        for origin, expected in allowed.items():
            headers = {"origin": origin, "access-control-request-method": "POST"}
            preflight = live.http.options("/v1/chat/completions", headers=headers)
            assert preflight.headers.get("access-control-allow-origin") == expected
            assert (preflight.status_code == 200) is (expected is not None)
            answer = live.http.get("/v1/models", headers={"origin": origin})
            assert answer.headers.get("access-control-allow-origin") == expected
            assert "x-request-id" in answer.headers["access-control-expose-headers"]


@pytest.mark.timeout(10)
def test_a_query_is_searched_for_secrets_in_linear_time():
    """The loop waits for it, and anybody may send 64 KiB."""
    for query in ("key" * 20_000, "key=&" * 12_000, "=" * 60_000, "&" * 60_000):
        shown = query_without_secrets(query)
        for _ in range(20):
            assert query_without_secrets(query) == shown
        assert shown == query.replace("key=&", "key=***&")
