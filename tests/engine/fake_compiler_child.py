"""A grammar compiler whose grammars say what happens to it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from trunkline.engine.grammar.backend import GrammarError, Vocabulary
from trunkline.engine.grammar.compiler_child import run_child
from trunkline.engine.messages import GrammarSpec


class ObedientBackend:
    """Compiles a text to itself, after doing what it says."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    def compile(self, spec: GrammarSpec) -> bytes:
        verb, _, argument = spec.text.partition(" ")
        if verb == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if verb == "sleep":
            time.sleep(float(argument))
        while verb == "spin":
            pass
        if verb == "memory":
            return bytes(8 << 30)[:0]
        if verb == "bad":
            raise GrammarError("it is bad.")
        if verb == "big":
            return bytes(int(argument))
        if verb == "pid":
            Path(argument).write_text(str(os.getpid()))
            time.sleep(60)
        return spec.text.encode()


if __name__ == "__main__":
    run_child(ObedientBackend)
