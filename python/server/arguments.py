"""Command line, `--config` file and environment -> `ServerConfig`.

The flags are generated from the config's dataclasses: a field is a flag, its metadata the help. A
value of the command line goes before the environment's, that before the file's, that before the
default. Knows nothing of what the settings mean (`combinations.py`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
import os
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn, TypeVar

import yaml

from trunkline.engine.config import SECRET
from trunkline.engine.suggestions import did_you_mean
from trunkline.engine.validation import RequestError
from trunkline.server import access_settings
from trunkline.server.combinations import refuse_contradictions
from trunkline.server.compat_flags import ALIASES, COMPAT_FLAGS, LATER, CompatFlag
from trunkline.server.config import ServerConfig
from trunkline.server.flags import add_version, bounded, unrecognized
from trunkline.server.preferred_sampling import ANY_MODEL, preferred_sampling

logger = logging.getLogger(__name__)

Group = TypeVar("Group")

_LIST: Final = tuple[str, ...]
_OPTIONAL: Final = (types.UnionType, typing.Union)
_PREFIX: Final = "compat_"


class UsageError(Exception):
    """A command line, configuration file or environment variable that cannot be used."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def parse_arguments(
    arguments: Sequence[str], environment: Mapping[str, str] = os.environ
) -> tuple[ServerConfig, list[str]]:
    """Put the configuration together.

    Returns:
        The configuration, and warnings about flags that have no effect.

    Raises:
        UsageError: a flag, key or value is unknown or not supported; the message says which.
    """
    parser = build_parser()
    path = _config_path(arguments)
    from_file = [] if path is None else _file_arguments(path)
    namespace: dict[str, Any] = {}
    unknown: list[str] = []
    for origin, words in (
        (f"--config {path}: ", from_file),
        ("the environment: ", _environment_arguments(environment)),
        ("", arguments),
    ):
        try:
            parsed, rest = parser.parse_known_args(words)
            namespace |= _with_priorities(vars(parsed))
        except UsageError as error:
            raise UsageError(f"{origin}{error}") from error
        unknown += rest
    warnings = [
        *(
            _judge(flag, namespace[_PREFIX + flag.name])
            for flag in COMPAT_FLAGS
            if _PREFIX + flag.name in namespace
        )
    ]
    if unknown:
        raise UsageError(_unknown(unknown, parser))
    config = _compose(ServerConfig, namespace)
    try:
        config = dataclasses.replace(config, http=access_settings.resolved(config.http))
        refuse_contradictions(config)
        preferred_sampling(config.api.preferred_sampling_params, ANY_MODEL)
    except (ValueError, RequestError) as error:
        raise UsageError(str(error)) from error
    return config, [text for text in warnings if text]


def _with_priorities(given: dict[str, Any]) -> dict[str, Any]:
    """What one place says, `--enable-priority-scheduling` under its other name."""
    if given.pop("enable_priority_scheduling", False):
        policy = given.setdefault("schedule_policy", "priority")
        if policy != "priority":
            raise UsageError(
                f"--enable-priority-scheduling contradicts --schedule-policy {policy}; leave one "
                "of them out"
            )
    return given


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """A command line to be shown: the values of secret settings are replaced."""
    secret = {
        name
        for kind in _groups(ServerConfig)
        for field, _ in _settings(kind)
        if field.metadata.get("secret")
        for name in _flag_names(field.name.replace("_", "-"))
    }
    shown: list[str] = []
    for word in arguments:
        name, equals, _ = word.partition("=")
        if shown and shown[-1] in secret:
            shown.append(SECRET)
        else:
            shown.append(f"{name}={SECRET}" if equals and name in secret else word)
    return shown


def _unknown(words: Sequence[str], parser: argparse.ArgumentParser) -> str:
    """What to say of words that are no flags."""
    if not words[0].startswith("-"):
        return f"unrecognized arguments: {' '.join(words)}; a model is given with --model-path"
    return unrecognized(words, parser)


def build_parser() -> argparse.ArgumentParser:
    """The parser, with one group of flags per settings dataclass."""
    parser = _Parser(
        prog="engine-serve",
        usage="engine-serve [--model-path MODEL] [options]",
        description="Serve a language model over the OpenAI API and the native /generate API.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32),
        epilog="A switch --NAME is undone by --no-NAME.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    add_version(parser)
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file of settings, by the names of the flags"
    )
    for kind in _groups(ServerConfig):
        title = (kind.__doc__ or kind.__name__).partition("\n")[0].rstrip(".")
        group = parser.add_argument_group(title)
        for field, annotation in _settings(kind):
            _add_setting(group, field, annotation)
    compat = parser.add_argument_group("Flags of other engines, for compatibility")
    compat.add_argument(
        "--enable-priority-scheduling",
        action="store_true",
        help="the same as --schedule-policy priority",
    )
    for flag in COMPAT_FLAGS:
        _add_compat(compat, flag)
    return parser


def _groups(kind: type) -> Iterator[type]:
    """The dataclass itself, then those of its fields, depth first."""
    yield kind
    for annotation in typing.get_type_hints(kind).values():
        if dataclasses.is_dataclass(annotation):
            yield from _groups(annotation)  # type: ignore[arg-type]


def _settings(kind: type) -> Iterator[tuple[dataclasses.Field[Any], Any]]:
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if not dataclasses.is_dataclass(hints[field.name]):
            yield field, hints[field.name]


def _flag_names(name: str) -> list[str]:
    return [f"--{one}" for one in (name, *ALIASES.get(name, ()))]


def _add_setting(
    group: argparse._ArgumentGroup, field: dataclasses.Field[Any], annotation: Any
) -> None:
    names = _flag_names(field.name.replace("_", "-"))
    words = field.metadata["help"].replace("%", "%%")
    if "env" in field.metadata:
        words += f" [environment: {field.metadata['env']}]"
    kind = annotation
    if typing.get_origin(annotation) in _OPTIONAL:
        kind = next(one for one in typing.get_args(annotation) if one is not type(None))
    if kind is bool:
        options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS}
        group.add_argument(*names, action="store_true", help=words, **options)
        off = [name.replace("--", "--no-", 1) for name in names]
        group.add_argument(*off, action="store_false", help=argparse.SUPPRESS, **options)
        return
    if kind == _LIST:
        _add_list(group, names, field, words)
        return
    if field.default is not None:
        words += f" (default: {field.default})"
    choices = field.metadata.get("choices")
    convert = kind
    if "minimum" in field.metadata:
        convert = bounded(kind, field.metadata["minimum"], field.metadata.get("maximum", math.inf))
    metavar = None if choices else {int: "N", float: "X", str: "TEXT"}[kind]
    group.add_argument(
        *names, dest=field.name, type=convert, choices=choices, metavar=metavar, help=words
    )


def _add_list(
    group: argparse._ArgumentGroup, names: list[str], field: dataclasses.Field[Any], words: str
) -> None:
    convert = _at_least_one if field.metadata.get("minimum") else _listed
    words += "; several: separated by commas, or the flag repeated"
    default: tuple[str, ...] = field.default  # type: ignore[assignment]
    if default:
        words += f" (default: {','.join(default)})"
    group.add_argument(
        *names, dest=field.name, action="extend", type=convert, metavar="TEXT,...", help=words
    )


def _listed(text: str) -> list[str]:
    """The entries of a comma-separated list, or of a JSON list of strings."""
    if not text.startswith("["):
        return [one for one in map(str.strip, text.split(",")) if one]
    try:
        entries = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not a JSON list: {error}") from None
    if not all(isinstance(one, str) for one in entries):
        raise argparse.ArgumentTypeError("must be a JSON list of strings")
    return list(entries)


def _at_least_one(text: str) -> list[str]:
    entries = _listed(text)
    if not entries:
        raise argparse.ArgumentTypeError("it is empty; leave the flag out instead")
    return entries


def _add_compat(group: argparse._ArgumentGroup, flag: CompatFlag) -> None:
    words = {
        "removed": "accepted with a warning: ",
        "always": "always so: ",
        "no effect": "no effect: ",
        "refused": "refused: ",
    }[flag.verdict]
    if flag.verdict == "refused" and flag.neutral:
        words = f"may only be {' or '.join(flag.neutral)}: "
    names, dest = _flag_names(flag.name), _PREFIX + flag.name
    if flag.is_switch:
        group.add_argument(*names, dest=dest, action="store_true", help=words + flag.reason)
    else:
        group.add_argument(*names, dest=dest, metavar="X", help=words + flag.reason)


def _judge(flag: CompatFlag, value: object) -> str | None:
    """What to warn of, None when there is nothing.

    Raises:
        UsageError: the flag is refused with this value.
    """
    shown = f"--{flag.name}" if flag.is_switch else f"--{flag.name} {value}"
    if value in flag.neutral or flag.verdict == "always":
        return None
    if flag.verdict == "refused":
        if flag.reason == LATER:
            raise UsageError(f"{shown} is {LATER}")
        only = f"; it may be {' or '.join(flag.neutral)}" if flag.neutral else ""
        raise UsageError(f"{shown} is not supported: {flag.reason}{only}")
    return f"{shown} has no effect: {flag.reason}"


def _config_path(arguments: Sequence[str]) -> str | None:
    finder = _Parser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config")
    return finder.parse_known_args(list(arguments))[0].config  # type: ignore[no-any-return]


def _file_arguments(path: str) -> list[str]:
    """The settings of a YAML file, written as flags."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        settings = yaml.safe_load(text)
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path} is not valid YAML: {error}") from error
    if settings is None:
        return []
    if not isinstance(settings, dict):
        raise UsageError(f"--config {path} must hold settings as `name: value`")
    _refuse_repeated(text, f"--config {path}")
    known = _switches()
    words: list[str] = []
    for key, value in settings.items():
        name = str(key).replace("_", "-")
        if name not in known or name in ("config", "help", "version"):
            close = did_you_mean(name, known)
            raise UsageError(f"--config {path}: unknown setting {key!r}{close}")
        words += _as_words(name, value, is_switch=known[name], origin=f"--config {path}: {key}")
    return words


def _refuse_repeated(text: str, origin: str) -> None:
    """Refuse a mapping with a setting that stands there twice: YAML would take the last."""
    node = yaml.compose(text, yaml.SafeLoader)
    seen: set[str] = set()
    for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
        name = str(key.value).replace("_", "-")
        if name in seen:
            raise UsageError(f"{origin}: {key.value!r} is set twice")
        seen.add(name)


def _as_words(name: str, value: object, *, is_switch: bool, origin: str) -> list[str]:
    """One setting as command-line words; null leaves the default."""
    if value is None:
        return []
    if is_switch:
        if not isinstance(value, bool):
            raise UsageError(f"{origin} must be true or false, got {value!r}")
        if value:
            return [f"--{name}"]
        return [f"--no-{name}"] if f"--no-{name}" in build_parser()._option_string_actions else []
    if isinstance(value, bool) or (isinstance(value, list) and name not in _list_flags()):
        raise UsageError(f"{origin} takes one value, got {value!r}")
    text = json.dumps(value) if isinstance(value, dict | list) else str(value)
    return [f"--{name}={text}"]


def _switches() -> dict[str, bool]:
    """Every flag without its dashes -> whether it takes no value."""
    return {
        option.removeprefix("--"): action.nargs == 0
        for option, action in build_parser()._option_string_actions.items()
        if option.startswith("--") and not option.startswith("--no-")
    }


def _list_flags() -> set[str]:
    """The names, without dashes, of the flags that take several values."""
    return {
        name.removeprefix("--")
        for kind in _groups(ServerConfig)
        for field, annotation in _settings(kind)
        if annotation == _LIST
        for name in _flag_names(field.name.replace("_", "-"))
    }


def _environment_arguments(environment: Mapping[str, str]) -> list[str]:
    """The settings whose environment variable is set, written as flags."""
    words: list[str] = []
    for kind in _groups(ServerConfig):
        for field, _ in _settings(kind):
            variable = field.metadata.get("env")
            if variable is not None and variable in environment:
                words.append(f"--{field.name.replace('_', '-')}={environment[variable]}")
    return words


def _compose(kind: type[Group], values: Mapping[str, Any]) -> Group:
    """Build a config dataclass from flat values, and those inside it."""
    hints = typing.get_type_hints(kind)
    chosen: dict[str, Any] = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if dataclasses.is_dataclass(hints[field.name]):
            chosen[field.name] = _compose(hints[field.name], values)
        elif field.name in values:
            value = values[field.name]
            chosen[field.name] = tuple(value) if hints[field.name] == _LIST else value
    return kind(**chosen)
