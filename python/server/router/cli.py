"""`engine-router`: command line and environment -> settings -> the proxy, until a signal."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, NoReturn

from trunkline._core import RouterError, serve_router
from trunkline.server.access_settings import check_key
from trunkline.server.flags import add_version, bounded, unrecognized
from trunkline.server.router.combinations import refuse_contradictions, without_effect
from trunkline.server.router.config import RouterConfig

USAGE_ERROR = 2
_KEYS = {"api_key", "admin_api_key", "worker_api_key"}


class UsageError(Exception):
    """A command line or environment variable that cannot be used."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Route as the command line says, until a signal.

    Returns:
        The exit code: 0 after a signal, 1 when the start failed, 2 for an unusable command line.
    """
    try:
        config, urls, warnings = parse(sys.argv[1:] if arguments is None else arguments, os.environ)
    except UsageError as error:
        print(f"engine-router: {error}\n(engine-router --help lists the flags)", file=sys.stderr)
        return USAGE_ERROR
    for warning in warnings:
        print(f"engine-router: {warning}", file=sys.stderr)
    # The proxy handles the signal and then calls the handler that was there before: none.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        serve_router(json.dumps(config.as_core(urls)).encode())
    except RouterError as error:
        print(f"engine-router: {error}", file=sys.stderr)
        return 1
    return 0


def parse(
    arguments: Sequence[str], environment: Mapping[str, str]
) -> tuple[RouterConfig, list[str], list[str]]:
    """Put the configuration together. A flag goes before the environment.

    Returns:
        The settings, the workers' addresses, and warnings about settings that change nothing.

    Raises:
        UsageError: a flag or value is unknown, out of range or contradicts another; the message
            says which.
    """
    parser, variables = _build_parser()
    given: dict[str, Any] = {
        name: environment[variable]
        for name, variable in variables.items()
        if variable in environment
    }
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise UsageError(_unknown(unknown, parser))
    given |= vars(parsed)
    urls = given.pop("worker_urls")
    if not urls and "admin_api_key" not in given:
        raise UsageError(
            "there are no workers: give --worker-urls, or --admin-api-key to add them while it runs"
        )
    groups = {
        group.name: typing.get_type_hints(RouterConfig)[group.name]
        for group in fields(RouterConfig)
    }
    made = {
        name: kind(**{one.name: given[one.name] for one in fields(kind) if one.name in given})
        for name, kind in groups.items()
    }
    config = RouterConfig(**made)
    try:
        for name in sorted(given.keys() & _KEYS):
            check_key(f"--{name.replace('_', '-')}", given[name])
        refuse_contradictions(config, given)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return config, urls, without_effect(config, given)


def _unknown(words: Sequence[str], parser: argparse.ArgumentParser) -> str:
    if words[0].startswith("-"):
        return unrecognized(words, parser)
    return f"unrecognized arguments: {' '.join(words)}; workers are given with --worker-urls"


def _build_parser() -> tuple[argparse.ArgumentParser, dict[str, str]]:
    """The parser, and the environment variables by setting."""
    parser = _Parser(
        prog="engine-router",
        usage="engine-router [--worker-urls URL ...] [options]",
        description="Stand in front of inference servers and send each request to the one that "
        "answers it soonest: by its load in tokens and by what its prefix cache holds.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32),
        epilog="A switch --NAME is undone by --no-NAME. Workers can be added, drained and removed "
        "while it runs: POST, PUT and DELETE /workers, with --admin-api-key.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    add_version(parser)
    parser.add_argument(
        "--worker-urls",
        nargs="*",
        metavar="URL",
        default=[],
        help="addresses of the workers, http://host:port each: this engine, SGLang, vLLM, "
        "llama.cpp or whatever speaks their APIs",
    )
    variables = {}
    for name, kind in typing.get_type_hints(RouterConfig).items():
        title = (kind.__doc__ or name).partition("\n")[0].rstrip(".")
        group = parser.add_argument_group(title)
        hints = typing.get_type_hints(kind)
        for one in fields(kind):
            _add_setting(group, one.name, hints[one.name], one.metadata, one.default)
            if "env" in one.metadata:
                variables[one.name] = one.metadata["env"]
    return parser, variables


def _add_setting(
    group: argparse._ArgumentGroup,
    name: str,
    annotation: Any,
    metadata: Mapping[str, Any],
    default: object,
) -> None:
    flag, words = "--" + name.replace("_", "-"), metadata["help"]
    if "env" in metadata:
        words += f" [environment: {metadata['env']}]"
    if annotation is bool:
        group.add_argument(
            flag,
            action=argparse.BooleanOptionalAction,
            help=f"{words} (default: {'on' if default else 'off'})",
        )
        return
    kind = next((one for one in typing.get_args(annotation) if one is not type(None)), annotation)
    if default not in (None, MISSING):
        words += f" (default: {default})"
    choices = metadata.get("choices")
    metavar = None if choices else {int: "N", float: "X", str: "TEXT"}[kind]
    convert = kind
    if "minimum" in metadata:
        convert = bounded(kind, metadata["minimum"], metadata.get("maximum", sys.float_info.max))
    group.add_argument(flag, type=convert, choices=choices, metavar=metavar, help=words)


if __name__ == "__main__":
    sys.exit(main())
