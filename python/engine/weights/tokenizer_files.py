"""A tokenizer in Hugging Face files: tokenizer.json and the small files beside it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from trunkline.engine.chat_template import TemplateSource
from trunkline.engine.checkpoint import CheckpointError
from trunkline.engine.tokenizer import NAMED_TOKENS, Tokenizer
from trunkline.engine.weights.json_files import read_optional_object

logger = logging.getLogger(__name__)

# Formats that need another library, and would give wrong ids if guessed at.
OTHER_FORMATS = ("tokenizer.model", "tekken.json", "vocab.json")


class TokenizerFiles:
    """Implements `TokenizerSource` for a directory, or for a tokenizer.json in one."""

    def __init__(self, path: Path) -> None:
        self._directory = path if path.is_dir() else path.parent
        self._json = path / "tokenizer.json" if path.is_dir() else path

    def exists(self) -> bool:
        return self._json.exists() or self._other_format() is not None

    def load(self) -> Tokenizer:
        if not self._json.exists():
            raise CheckpointError(self._missing())
        try:
            backend = tokenizers.Tokenizer.from_file(str(self._json))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"cannot read {self._json}: {error}") from error
        config = self._config()
        self._add_tokens(backend, config.get("added_tokens_decoder", {}))
        return Tokenizer(backend, self._named_tokens(backend, config))

    def templates(self) -> TemplateSource | None:
        templates = _listed_templates(self._config().get("chat_template"), self._directory)
        files = {"default": self._directory / "chat_template.jinja"}
        extra = self._directory / "additional_chat_templates"
        files |= {path.stem: path for path in sorted(extra.glob("*.jinja"))}
        for name, path in files.items():
            if path.exists():
                templates[name] = TemplateSource.from_file(path).templates["default"]
        return TemplateSource(templates, str(self._directory)) if templates else None

    def _config(self) -> dict[str, Any]:
        return read_optional_object(self._directory / "tokenizer_config.json")

    def _other_format(self) -> str | None:
        found = (name for name in OTHER_FORMATS if (self._directory / name).exists())
        return next(found, None)

    def _missing(self) -> str:
        if (other := self._other_format()) is None:
            return f"{self._json} is missing; give a tokenizer with --tokenizer-path"
        return (
            f"{self._directory} has only {other}, which is not supported: save the tokenizer as "
            "tokenizer.json (AutoTokenizer.from_pretrained(...).save_pretrained(...) of "
            "transformers does) or give one with --tokenizer-path"
        )

    def _add_tokens(self, backend: tokenizers.Tokenizer, described: Mapping[str, Any]) -> None:
        """Add the tokens that only tokenizer_config.json knows, under the ids that it gives."""
        known = backend.get_added_tokens_decoder()
        where = self._directory / "tokenizer_config.json"
        for token_id, entry in sorted(described.items(), key=lambda item: int(item[0])):
            if int(token_id) in known:
                continue
            token = tokenizers.AddedToken(**entry)
            backend.add_tokens([token])
            if backend.token_to_id(token.content) != int(token_id):
                raise CheckpointError(
                    f"{where} gives {token.content!r} the id {token_id}, {self._json.name} gives "
                    f"it {backend.token_to_id(token.content)}"
                )

    def _named_tokens(
        self, backend: tokenizers.Tokenizer, config: Mapping[str, Any]
    ) -> dict[str, str]:
        older = read_optional_object(self._directory / "special_tokens_map.json")
        named = {}
        for role in NAMED_TOKENS:
            value = config[role] if role in config else older.get(role)
            token = value.get("content") if isinstance(value, dict) else value
            if token is None:
                continue
            if not isinstance(token, str):
                raise CheckpointError(f"{self._directory}: {role} is {value!r}, not a token")
            if backend.token_to_id(token) is not None:
                named[role] = token
            elif role in ("bos_token", "eos_token"):
                raise CheckpointError(
                    f"{self._directory}: {role} {token!r} is not in the vocabulary"
                )
            else:
                logger.warning("%s: %s %r is not in the vocabulary", self._directory, role, token)
        return named


def _listed_templates(value: object, directory: Path) -> dict[str, str]:
    """`chat_template` of tokenizer_config.json: a text, or a list of named texts."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    templates: dict[str, str] = {}
    for entry in value if isinstance(value, list) else [value]:
        match entry:
            case {"name": str(name), "template": str(template)}:
                templates[name] = template
            case _:
                raise CheckpointError(
                    f"{directory / 'tokenizer_config.json'}: chat_template must be a text or a "
                    "list of objects with name and template"
                )
    return templates
