"""A splitter whose marks are single characters, so that scripted answers hold pieces of all kinds.

`THINK` and `SAY` begin reasoning and content; `CALL` a tool call, whose name ends at `WITH`.
"""

from __future__ import annotations

from trunkline.server.openai.pieces import Arguments, Content, Piece, Reasoning, ToolCall

THINK, SAY, CALL, WITH = "\x01\x02\x03\x04"


class MarkSplitter:
    """Yields one piece per run of characters; a call as soon as its name is whole."""

    def __init__(self) -> None:
        self._mode = SAY
        self._name = ""
        self._num_calls = 0

    def feed(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        run = ""
        for char in text:
            if char not in (THINK, SAY, CALL, WITH):
                run += char
                continue
            pieces += self._run(run)
            run = ""
            if char == WITH:
                self._num_calls += 1
                index = self._num_calls - 1
                pieces.append(ToolCall(index, f"call_{index}", self._name))
                self._name = ""
            self._mode = char
        return [*pieces, *self._run(run)]

    def _run(self, run: str) -> list[Piece]:
        if not run:
            return []
        if self._mode == THINK:
            return [Reasoning(run)]
        if self._mode == SAY:
            return [Content(run)]
        if self._mode == WITH:
            return [Arguments(self._num_calls - 1, run)]
        self._name += run
        return []

    def end(self) -> list[Piece]:
        return []
