"""A multipart body to a file on disk, piece by piece, in bounded memory.

Knows the form's fields; nothing of what becomes of the file.
"""

from __future__ import annotations

import asyncio
import errno
import re
from pathlib import Path
from typing import BinaryIO, Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from trunkline.engine.validation import RequestError, shown
from trunkline.server.batches.records import PURPOSES

_PIECE_BYTES: Final = 1 << 20  # of a body, per visit to the disk
_FORM_BYTES: Final = 64 << 10  # what a form may have besides the file
_FIELD_BYTES: Final = 1024
_MAX_PARTS: Final = 16
_MAX_NAME_CHARS: Final = 255
_FIELDS: Final = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
EXPIRY_S: Final = (3600, 2592000)


class Upload:
    """One form as it comes in; `feed` may block, and must not be called after it has raised."""

    def __init__(self, content_type: str, file: BinaryIO, max_bytes: int) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise RequestError(
                "Content-Type must be multipart/form-data with a boundary, got "
                f"{content_type[:80]!r}.",
                "content-type",
            )
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin_part,
                    "on_header_field": self._header_name,
                    "on_header_value": self._header_value,
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._end_headers,
                    "on_part_data": self._data,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise RequestError(f"the multipart boundary: {error}", "content-type") from error
        self._file = file
        self._max_bytes = max_bytes
        self._num_parts = 0
        self._is_complete = False
        self._name = ""
        self._header = b""
        self._value = b""
        self._disposition = b""
        self.num_bytes = 0
        self.filename: str | None = None
        self.fields: dict[str, bytes] = {}
        self.ignored: list[str] = []

    def feed(self, data: bytes) -> None:
        """Take the next piece of the body.

        Raises:
            RequestError: it is no form, or has too much (413).
            OSError: the disk does not take it.
        """
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise RequestError(f"the multipart body is malformed: {error}") from error

    def finish(self) -> None:
        """Check that the form was whole and had a file.

        Raises:
            RequestError: it was or had not.
        """
        if not self._is_complete:
            raise RequestError("the multipart body ends too early.")
        if self.filename is None:
            raise RequestError("the form has no file.", "file")

    def _begin_part(self) -> None:
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise RequestError(f"the form has more than {_MAX_PARTS} parts.")
        self._header = self._value = self._disposition = b""

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header = self._value = b""

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = _text(options.get(b"name", b""))
        if self._name == "file":
            if self.filename is not None:
                raise RequestError("the form has more than one file.", "file")
            self.filename = base_name(_text(options.get(b"filename", b"")))
        elif self._name not in _FIELDS:
            self.ignored.append(self._name)

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._name == "file":
            self.num_bytes += end - start
            if self.num_bytes > self._max_bytes:
                raise too_large(f"more than {self._max_bytes}", self._max_bytes)
            self._file.write(memoryview(data)[start:end])
        elif self._name in _FIELDS:
            value = self.fields.get(self._name, b"") + data[start:end]
            if len(value) > _FIELD_BYTES:
                raise RequestError(f"{self._name} is longer than {_FIELD_BYTES} bytes.", self._name)
            self.fields[self._name] = value

    def _end(self) -> None:
        self._is_complete = True


def too_large(size: str, most: int) -> RequestError:
    """The error for a file that is too large (413)."""
    return RequestError(
        f"the file has {size} bytes, the limit is {most} (--max-file-bytes).", "file", status=413
    )


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")


def base_name(name: str) -> str:
    """The last component of a client's file name, without control characters, of bounded length."""
    last = re.split(r"[/\\]", name)[-1]
    shown = "".join(char if char.isprintable() else "_" for char in last)[:_MAX_NAME_CHARS]
    return "file" if shown in ("", ".", "..") else shown


async def receive(request: Request, path: Path, max_bytes: int) -> Upload:
    """Write the file of a request's form to `path`; the form, complete.

    Raises:
        RequestError: it is no form with a file, or the file is too large (413) or does not fit on
            the disk (507).
    """
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > max_bytes + _FORM_BYTES:
        raise too_large(f"about {length}", max_bytes)
    try:
        with path.open("xb") as file:
            upload = Upload(request.headers.get("content-type", ""), file, max_bytes)
            pieces: list[bytes] = []
            size = total = 0
            async for part in request.stream():
                pieces.append(part)
                size, total = size + len(part), total + len(part)
                if total > max_bytes + _FORM_BYTES:
                    raise too_large(f"more than {max_bytes}", max_bytes)
                if size >= _PIECE_BYTES:
                    await asyncio.to_thread(upload.feed, b"".join(pieces))
                    pieces, size = [], 0
            await asyncio.to_thread(upload.feed, b"".join(pieces))
            await asyncio.to_thread(file.flush)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise RequestError(
                f"the file cannot be stored: {error.strerror}.", "file", status=507
            ) from error
        raise
    upload.finish()
    return upload


def parse_purpose(fields: dict[str, bytes]) -> str:
    """What the file is for.

    Raises:
        RequestError: it is none of OpenAI's purposes.
    """
    purpose = _text(fields.get("purpose", b"batch"))
    if purpose not in PURPOSES:
        raise RequestError(
            f"purpose must be one of {', '.join(PURPOSES)}, got {purpose[:80]!r}.", "purpose"
        )
    return purpose


def parse_expiry(fields: dict[str, bytes]) -> int | None:
    """The seconds that the file is to be kept; None: until it is deleted.

    Raises:
        RequestError: they are out of range, or counted from anything but its creation.
    """
    seconds, anchor = fields.get("expires_after[seconds]"), fields.get("expires_after[anchor]")
    if seconds is None and anchor is None:
        return None
    text = _text(seconds or b"")
    value = int(text) if text.isascii() and text[:12].isdecimal() and len(text) <= 12 else None
    return check_expiry(_text(anchor or b""), value, "expires_after")


def check_expiry(anchor: object, seconds: object, name: str) -> int:
    """The seconds of an `expires_after` object.

    Raises:
        RequestError: they are out of range, or counted from anything but the creation.
    """
    if anchor != "created_at":
        raise RequestError(f"{name}.anchor must be created_at, got {shown(anchor)}.", name)
    low, high = EXPIRY_S
    if not isinstance(seconds, int) or isinstance(seconds, bool) or not low <= seconds <= high:
        raise RequestError(
            f"{name}.seconds must be an integer in [{low}, {high}], got {shown(seconds)}.", name
        )
    return seconds
