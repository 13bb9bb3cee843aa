"""HTTPS: HTTP/2 and HTTP/1.1, client certificates, certificates that are renewed."""

from __future__ import annotations

import ssl
import warnings
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import trustme
from cryptography.hazmat.primitives import serialization
from tests.server.fake_engine import FakeEngine
from tests.server.live import Live

from trunkline.server.config import HttpOptions, ServerConfig
from trunkline.server.tls import TlsError, is_password_needless, server_context


def write(folder: Path, certificate: trustme.LeafCert) -> HttpOptions:
    chain, key = folder / "chain.pem", folder / "key.pem"
    chain.unlink(missing_ok=True)
    for blob in certificate.cert_chain_pems:
        blob.write_to_path(chain, append=True)
    certificate.private_key_pem.write_to_path(key)
    return HttpOptions(ssl_certfile=str(chain), ssl_keyfile=str(key))


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def options(authority: trustme.CA, tmp_path: Path) -> HttpOptions:
    return write(tmp_path, authority.issue_cert("127.0.0.1"))


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


def client(live: Live, context: ssl.SSLContext, *, http2: bool = False) -> httpx.Client:
    url = f"https://127.0.0.1:{live.port}"
    return httpx.Client(base_url=url, verify=context, http1=not http2, http2=http2, timeout=10)


@pytest.mark.parametrize("http2", [False, True])
def test_requests_and_streams_over_tls(authority: trustme.CA, options: HttpOptions, http2: bool):
    with (
        Live(FakeEngine(delay_s=0.001), ServerConfig(http=options)) as live,
        client(live, trusting(authority), http2=http2) as http,
    ):
        answer = http.post("/generate", json={"text": "x"})
        assert answer.json()["text"] == "Hello world"
        assert answer.http_version == ("HTTP/2" if http2 else "HTTP/1.1")
        with http.stream("POST", "/generate", json={"text": "x", "stream": True}) as response:
            text = "".join(response.iter_text())
        assert text.endswith("data: [DONE]\n\n")
        assert (
            len(http.post("/tokenize", json={"prompt": "x" * 200_000}).json()["tokens"]) == 200_000
        )
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(f"http://127.0.0.1:{live.port}/health")
        assert live.server.in_flight == 0


def test_who_disconnects_aborts(authority: trustme.CA, options: HttpOptions):
    engine = FakeEngine(delay_s=0.01)
    with Live(engine, ServerConfig(http=options)) as live:
        with client(live, trusting(authority)) as http:
            body = {"text": "x", "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
            with http.stream("POST", "/generate", json={**body, "stream": True}) as response:
                next(response.iter_text())
        with client(live, trusting(authority)) as http:
            while live.server.in_flight:
                assert http.get("/health").status_code == 200
        assert engine.aborted


def test_old_protocols_are_refused(authority: trustme.CA, options: HttpOptions):
    context = trusting(authority)
    with warnings.catch_warnings(action="ignore"):
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    with (
        Live(config=ServerConfig(http=options)) as live,
        client(live, context) as http,
        pytest.raises(httpx.ConnectError),
    ):
        http.get("/health")


def test_clients_show_a_certificate(authority: trustme.CA, options: HttpOptions, tmp_path: Path):
    authorities = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(authorities)
    config = ServerConfig(http=replace(options, ssl_ca_certs=str(authorities)))
    known, stranger = trusting(authority), trusting(authority)
    authority.issue_cert("client@example.org").configure_cert(known)
    trustme.CA().issue_cert("client@example.org").configure_cert(stranger)
    with Live(config=config) as live:
        with client(live, known) as http:
            assert http.get("/health").status_code == 200
        for context in (stranger, trusting(authority)):
            with client(live, context) as http, pytest.raises(httpx.TransportError):
                http.get("/health")


def serial(live: Live, authority: trustme.CA) -> str:
    context = trusting(authority)
    with client(live, context) as http, http.stream("GET", "/health") as response:
        stream = response.extensions["network_stream"]
        return str(stream.get_extra_info("ssl_object").getpeercert()["serialNumber"])


def test_a_renewed_certificate_is_used(authority: trustme.CA, options: HttpOptions, tmp_path: Path):
    config = ServerConfig(http=replace(options, enable_ssl_refresh=True))
    with Live(config=config) as live:
        first = serial(live, authority)
        write(tmp_path, authority.issue_cert("127.0.0.1"))
        second = serial(live, authority)
        assert second != first
        (tmp_path / "chain.pem").write_text("broken")
        assert serial(live, authority) == second
        write(tmp_path, authority.issue_cert("127.0.0.1"))
        assert serial(live, authority) not in (first, second)


def test_without_refresh_the_first_certificate_stays(
    authority: trustme.CA, options: HttpOptions, tmp_path: Path
):
    with Live(config=ServerConfig(http=options)) as live:
        first = serial(live, authority)
        write(tmp_path, authority.issue_cert("127.0.0.1"))
        assert serial(live, authority) == first


def test_unusable_files(options: HttpOptions, tmp_path: Path):
    assert server_context(HttpOptions()) is None
    other = tmp_path / "other"
    other.mkdir()
    stranger = write(other, trustme.CA().issue_cert("127.0.0.1"))
    for broken in (
        replace(options, ssl_keyfile=stranger.ssl_keyfile),
        replace(options, ssl_certfile=options.ssl_keyfile),
        replace(options, ssl_ca_certs=options.ssl_keyfile),
    ):
        with pytest.raises(TlsError, match="--ssl-c"):
            server_context(broken)


def test_a_certificate_without_its_key(authority: trustme.CA, tmp_path: Path):
    certificate = tmp_path / "certificate.pem"
    authority.issue_cert("127.0.0.1").cert_chain_pems[0].write_to_path(certificate)
    with pytest.raises(TlsError, match="without --ssl-keyfile must hold the private key"):
        server_context(HttpOptions(ssl_certfile=str(certificate)))


def test_a_password_is_needed_by_an_encrypted_key(options: HttpOptions, tmp_path: Path):
    assert not is_password_needless(HttpOptions())
    assert not is_password_needless(options)
    with_password = replace(options, ssl_keyfile_password="secret")
    assert is_password_needless(with_password)
    key = serialization.load_pem_private_key((tmp_path / "key.pem").read_bytes(), None)
    encrypted = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    (tmp_path / "key.pem").write_bytes(encrypted)
    assert server_context(with_password) is not None
    assert not is_password_needless(with_password)
