"""What the settings of keys and TLS must satisfy together, and the keys that lie in a file."""

from __future__ import annotations

from dataclasses import replace

from trunkline.server.config import HttpOptions


def resolved(options: HttpOptions) -> HttpOptions:
    """The same options with the keys of `api_key_file` among `api_key`.

    Raises:
        ValueError: a key is empty or cannot be sent in a header, a file cannot be read, or TLS is
            half configured; the message names the flag and never shows a key.
    """
    for flag, key in (
        *(("--api-key", key) for key in options.api_key),
        ("--admin-api-key", options.admin_api_key),
    ):
        if key is not None:
            check_key(flag, key)
    _check_tls(options)
    if options.api_key_file is None:
        return options
    return replace(options, api_key=(*options.api_key, *_read_keys(options.api_key_file)))


def _read_keys(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.strip() for line in file]
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ValueError(f"--api-key-file {path}: {why}") from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ValueError(f"--api-key-file {path} holds no key; one per line is expected")
    for key in keys:
        check_key(f"--api-key-file {path}", key)
    return keys


def check_key(flag: str, key: str) -> None:
    """Refuse a key that cannot be sent in a header.

    Raises:
        ValueError: it is empty, or has characters that do not fit.
    """
    if not key:
        raise ValueError(f"{flag} is empty; leave it out to do without")
    if not all("!" <= char <= "~" for char in key):
        raise ValueError(f"{flag} has a key with spaces or characters outside ASCII")


def _check_tls(options: HttpOptions) -> None:
    if options.ssl_certfile is None:
        for name in ("ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs", "enable_ssl_refresh"):
            if getattr(options, name):
                raise ValueError(f"--{name.replace('_', '-')} needs --ssl-certfile")
    for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        path = getattr(options, name)
        if path is not None:
            try:
                open(path, "rb").close()
            except OSError as error:
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} {path}: {error.strerror}") from error
