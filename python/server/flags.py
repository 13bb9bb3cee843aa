"""What the command lines of the server and the router have in common."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from trunkline._core import VERSION
from trunkline.engine.suggestions import did_you_mean

Number = TypeVar("Number", int, float)


def add_version(parser: argparse.ArgumentParser) -> None:
    """Let `--version` print the version and end the program."""
    parser.add_argument(
        "--version",
        action="version",
        version=f"{parser.prog} {VERSION}",
        help="show the version and exit",
    )


def unrecognized(words: Sequence[str], parser: argparse.ArgumentParser) -> str:
    """What to say of words that the parser does not know; the first begins with a dash."""
    # What follows a misspelt flag may be a secret.
    flags = [word.partition("=")[0] for word in words if word.startswith("-")]
    known = parser._option_string_actions
    return f"unrecognized arguments: {' '.join(flags)}{did_you_mean(flags[0], known)}"


def bounded(
    kind: type[Number], minimum: float, maximum: float = math.inf
) -> Callable[[str], Number]:
    """A conversion that refuses what lies outside the bounds, and what is no number."""

    def convert(text: str) -> Number:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"invalid {kind.__name__} value: {text!r}") from None
        if not value >= minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}, got {text}")
        if value > maximum:
            raise argparse.ArgumentTypeError(f"must be at most {maximum}, got {text}")
        return value

    return convert
