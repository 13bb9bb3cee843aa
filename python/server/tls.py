"""TLS from certificate files. Knows nothing of HTTP, but for the names of its versions."""

from __future__ import annotations

import os
import ssl
from typing import Final

from trunkline.server import logs
from trunkline.server.config import HttpOptions

_PROTOCOLS: Final = ["h2", "http/1.1"]
_CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"


class TlsError(Exception):
    """Certificate, key or authorities cannot be used; the message says why."""


def server_context(options: HttpOptions) -> ssl.SSLContext | None:
    """The context for accepted connections; None when no certificate is configured.

    With `ssl_ca_certs` clients must show a certificate. With `enable_ssl_refresh` the files are
    read again when they change; files that cannot be used leave the last good ones in place.

    Raises:
        TlsError: the files cannot be used.
    """
    if options.ssl_certfile is None:
        return None
    context = _load(options)
    if options.enable_ssl_refresh:
        _Refresh(options).attach(context)
    return context


def is_password_needless(options: HttpOptions) -> bool:
    """Whether there is a password for a private key that is not encrypted.

    The files must be such as `server_context` has taken.
    """
    if options.ssl_certfile is None or options.ssl_keyfile_password is None:
        return False
    password, asked = options.ssl_keyfile_password, []

    def ask() -> str:
        asked.append(True)
        return password

    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
        options.ssl_certfile, options.ssl_keyfile, ask
    )
    return not asked


def _load(options: HttpOptions) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.set_ciphers(_CIPHERS)  # those of TLS 1.2 that HTTP/2 allows
    context.set_alpn_protocols(_PROTOCOLS)
    assert options.ssl_certfile is not None
    password = options.ssl_keyfile_password or ""
    try:
        # Without a password OpenSSL would ask for one on the terminal.
        context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile, lambda: password)
    except (OSError, ssl.SSLError) as error:
        raise TlsError(_unusable(options, error)) from error
    if options.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(options.ssl_ca_certs)
        except (OSError, ssl.SSLError) as error:
            raise TlsError(f"--ssl-ca-certs {options.ssl_ca_certs}: {error}") from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _unusable(options: HttpOptions, error: OSError) -> str:
    """Why certificate and key are not taken, and what to do about it."""
    why = str(error.strerror or error)
    if getattr(error, "reason", None) == "PEM_LIB":  # all that OpenSSL tells then
        why = "no certificate and private key in PEM are found there, or the password is wrong"
    certificate = f"--ssl-certfile {options.ssl_certfile}"
    if options.ssl_keyfile is None:
        return f"{certificate} without --ssl-keyfile must hold the private key, too: {why}"
    return f"{certificate} with --ssl-keyfile {options.ssl_keyfile}: {why}"


class _Refresh:
    """Looks at the files' times with every handshake, and hands it the newest context."""

    def __init__(self, options: HttpOptions) -> None:
        self._options = options
        self._times = self._read_times()
        self._context: ssl.SSLContext | None = None

    def attach(self, context: ssl.SSLContext) -> None:
        context.sni_callback = self._handshake

    def _handshake(self, connection: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
        times = self._read_times()
        if times != self._times:
            self._times = times
            try:
                self._context = _load(self._options)
            except TlsError as error:
                logs.SERVER.error("the changed TLS files are not used: %s", error)
            else:
                logs.SERVER.info("TLS certificate and key were read again")
        if self._context is not None:
            connection.context = self._context

    def _read_times(self) -> list[int]:
        options = self._options
        paths = (options.ssl_certfile, options.ssl_keyfile, options.ssl_ca_certs)
        return [_changed_ns(path) for path in paths if path is not None]


def _changed_ns(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:  # being replaced
        return 0
