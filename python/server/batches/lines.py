"""The lines of a batch's input: read in bounded memory, checked, and the kinds there are.

Knows what a line must look like; its body is the endpoint's own affair.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Final, NamedTuple

import orjson

from trunkline.engine.validation import RequestError, shown
from trunkline.server.answer import Prepared
from trunkline.server.openai.chat import prepare_chat
from trunkline.server.openai.completions import prepare_completion
from trunkline.server.openai.embeddings import prepare_embedding
from trunkline.server.openai.responses import prepare_response
from trunkline.server.state import Server


def prepare_response_line(body: Any, server: Server, rid: str) -> Prepared:
    """A response of a batch: it is only stored if its body says so, lest others have to make room.

    Raises:
        RequestError: as for any response, or it asks for the background, where it is already.
    """
    if body.get("background"):
        raise RequestError("background must not be true in a batch.", "background")
    store = False if body.get("store") is None else body["store"]
    return prepare_response({**body, "store": store}, server, rid)


# Endpoint -> how the body of a line becomes work. An endpoint becomes usable in batches here.
LINE_KINDS: Final[Mapping[str, Callable[[Any, Server, str], Prepared]]] = {
    "/v1/chat/completions": prepare_chat,
    "/v1/completions": prepare_completion,
    "/v1/responses": prepare_response_line,
    "/v1/embeddings": prepare_embedding,
}
MAX_LINES: Final = 50_000
MAX_ID_CHARS: Final = 512
_KEYS: Final = ("custom_id", "method", "url", "body")
MAX_PROBLEMS: Final = 100
_BOM: Final = b"\xef\xbb\xbf"


class RawLine(NamedTuple):
    """A line that is not blank. `number` counts from 1; `text` is None if the line is too long."""

    number: int
    text: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line that is a well-formed request. `ignored` names what it has beside that."""

    number: int
    custom_id: str
    body: dict[str, Any]
    num_bytes: int
    ignored: tuple[str, ...] = ()


class Problem(NamedTuple):
    """Why a batch cannot be run, as the API shows it. `line` is None for the whole file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None

    def shown(self) -> dict[str, Any]:
        """The entry of the batch object's `errors.data`."""
        return self._asdict()


class BadLine(Exception):
    """A line is no request; `problem` says why."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def raw_lines(file: BinaryIO, max_bytes: int) -> Iterator[RawLine]:
    """The lines of a file that are not blank, of which no more than `max_bytes` is held.

    The file is at its beginning; a byte order mark there belongs to no line.
    """
    if file.read(len(_BOM)) != _BOM:
        file.seek(0)
    number = 0
    while line := file.readline(max_bytes + 1):
        number += 1
        if len(line) > max_bytes and not line.endswith(b"\n"):
            while (rest := file.readline(1 << 20)) and not rest.endswith(b"\n"):
                pass
            yield RawLine(number, None)
        elif line.strip():
            yield RawLine(number, line)


def parse_line(raw: RawLine, endpoint: str, max_bytes: int) -> Line:
    """Decode a line and check all of it but its body's fields.

    Raises:
        BadLine: it is no request to `endpoint`.
    """

    def bad(code: str, message: str, param: str | None = None) -> BadLine:
        return BadLine(Problem(code, message, raw.number, param))

    if raw.text is None:
        raise bad("line_too_long", f"The line is longer than {max_bytes} bytes.")
    try:
        entry = orjson.loads(raw.text)
    except orjson.JSONDecodeError as error:
        raise bad("invalid_json_line", f"The line is not valid JSON: {error}.") from error
    if not isinstance(entry, dict):
        raise bad("invalid_json_line", "The line is not a JSON object.")
    custom_id, url, body = entry.get("custom_id"), entry.get("url"), entry.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID_CHARS:
        raise bad(
            "invalid_custom_id",
            f"custom_id must be a string of 1 to {MAX_ID_CHARS} characters.",
            "custom_id",
        )
    if entry.get("method") != "POST":
        raise bad(
            "invalid_method", f"method must be POST, got {_shown(entry, 'method')}.", "method"
        )
    if url not in (endpoint, endpoint.removeprefix("/v1")):
        raise bad(
            "invalid_url",
            f"url must be the batch's endpoint {endpoint}, got {_shown(entry, 'url')}.",
            "url",
        )
    if not isinstance(body, dict):
        raise bad("invalid_body", f"body must be an object, got {_shown(entry, 'body')}.", "body")
    if body.get("stream"):
        raise bad("invalid_body", "stream must not be true in a batch.", "body.stream")
    return Line(
        number=raw.number,
        custom_id=custom_id,
        body=body,
        num_bytes=len(raw.text),
        ignored=tuple(f"line.{key}" for key in entry if key not in _KEYS),
    )


def _shown(entry: Mapping[str, Any], name: str) -> str:
    return shown(entry[name]) if name in entry else "none"


class Validation:
    """Looks at every line of an input; afterwards `problems` is empty if it can be run."""

    def __init__(self, endpoint: str, server: Server) -> None:
        self._endpoint = endpoint
        self._server = server
        self._lines_by_id: dict[bytes, int] = {}
        self.problems: list[Problem] = []
        self.total = 0

    def run(self, file: BinaryIO) -> None:
        """Check a whole file; stops early once there are too many problems or lines."""
        max_bytes = self._server.config.http.max_body_bytes
        for raw in raw_lines(file, max_bytes):
            self.total += 1
            if self.total > MAX_LINES:
                text = f"The file has more than {MAX_LINES} requests; split it."
                self.problems.append(Problem("too_many_requests", text))
                return
            try:
                self._check(parse_line(raw, self._endpoint, max_bytes))
            except BadLine as bad:
                self.problems.append(bad.problem)
                if len(self.problems) == MAX_PROBLEMS:
                    text = f"The file was not read beyond the first {MAX_PROBLEMS} errors."
                    self.problems.append(Problem("too_many_errors", text, raw.number))
                    return
        if self.total == 0:
            self.problems.append(Problem("empty_file", "The file has no requests."))

    def _check(self, line: Line) -> None:
        digest = hashlib.blake2b(line.custom_id.encode(), digest_size=16).digest()
        first = self._lines_by_id.setdefault(digest, line.number)
        if first != line.number:
            text = f"custom_id {line.custom_id[:80]!r} was used in line {first} already."
            raise BadLine(Problem("duplicate_custom_id", text, line.number, "custom_id"))
        try:
            self._server.check_model(line.body.get("model"))
        except RequestError as error:
            code = error.code or "invalid_model"
            raise BadLine(Problem(code, error.message, line.number, "body.model")) from error


def line_id(batch_id: str, number: int) -> str:
    """The id of a line's request and answer: the same however often it is run, so is its seed."""
    return f"batch_req_{hashlib.sha256(f'{batch_id}/{number}'.encode()).hexdigest()[:32]}"
