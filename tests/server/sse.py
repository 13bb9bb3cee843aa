"""Server-sent events as a strict reader sees them."""

from __future__ import annotations

import json
from typing import Any

import httpx


def events(response: httpx.Response, *, done: bool = True) -> list[Any]:
    """The JSON payloads of a stream that must end with [DONE] (or, not `done`, without)."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = response.content.decode().split("\n\n")
    assert frames.pop() == ""
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    payloads = [frame.removeprefix("data: ") for frame in frames]
    assert (payloads[-1] == "[DONE]") is done
    return [json.loads(payload) for payload in (payloads[:-1] if done else payloads)]


def texts(chunks: list[Any]) -> dict[int, str]:
    """Joined text of each choice of an OpenAI stream."""
    joined: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            text = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            joined[choice["index"]] = joined.get(choice["index"], "") + text
    return joined
