"""A JSON Schema as a set of numbered nodes: identities, anchors and references.

Knows where subschemas stand and how URIs resolve, not what keywords mean. Equal subschemas under
one base URI are one node, so that what is made from them is shared.
"""

import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

TRUE, FALSE = 0, 1

_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SCHEMAS = (
    "additionalProperties", "propertyNames", "items", "additionalItems", "contains", "not", "if",
    "then", "else", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip


class SchemaError(ValueError):
    """A schema that is malformed, cannot be satisfied or is not enforced: it is refused.

    `path` is a JSON pointer into the schema (`#/properties/a`), `keyword` the offender (or an
    empty string when it is the schema itself).
    """

    def __init__(self, path: str, keyword: str, message: str) -> None:
        super().__init__(f"{path}: {keyword + ': ' if keyword else ''}{message}")
        self.path = path
        self.keyword = keyword
        self.message = message


class CircularSchema(SchemaError):
    """A schema that applies to a value only if it applies to that value."""


@dataclass(frozen=True)
class Limits:
    """Bounds on what a schema may cost; each has its own clear refusal."""

    schema_nodes: int = 20_000
    schema_depth: int = 64
    branches: int = 256
    steps: int = 200_000
    rules: int = 20_000
    grammar_bytes: int = 2_000_000


@dataclass(frozen=True)
class Node:
    """One subschema: its text is in `schema`, its place in `path`, its base URI in `base`."""

    number: int
    schema: dict[str, Any]
    path: str
    base: str


class Document:
    """The nodes of one schema. Nodes 0 and 1 are the schemas `true` and `false`.

    Raises:
        SchemaError: The schema is no JSON Schema, or is too large.
    """

    def __init__(self, schema: object, limits: Limits) -> None:
        self._limits = limits
        _check_depth(schema, 2 * limits.schema_depth)
        self._nodes: list[Node] = [Node(TRUE, {}, "#", ""), Node(FALSE, {"not": {}}, "#", "")]
        self._known: dict[tuple[str, str], int] = {}
        self._resources: dict[str, tuple[object, str, str]] = {}
        self._anchors: dict[tuple[str, str], tuple[object, str]] = {}
        self._collect(schema, "#", "")
        self._resources.setdefault("", (schema, "#", ""))
        self.root = self._intern(schema, "#", "")

    def node(self, number: int) -> Node:
        """The node of a number."""
        return self._nodes[number]

    def child(self, node: Node, *steps: str | int) -> int:
        """The number of the subschema reached from `node` by keys and indices."""
        value: Any = node.schema
        path = node.path
        for step in steps:
            value = value[step]
            path = _deeper(path, step)
        return self._intern(value, path, node.base)

    def constant(self, value: object, path: str) -> int:
        """A node that only `value` satisfies."""
        return self._intern({"const": value}, path, "")

    def derived(self, schema: dict[str, Any], node: Node) -> int:
        """A node for a schema built from parts of `node`'s."""
        return self._intern(schema, node.path, node.base)

    def reference(self, node: Node, keyword: str = "$ref") -> int:
        """The number of the node that a reference leads to.

        Raises:
            SchemaError: It leads nowhere, or out of this document.
        """
        reference = node.schema[keyword]
        if not isinstance(reference, str):
            raise SchemaError(node.path, keyword, "must be a string")
        whole = node.base + reference if reference[:1] == "#" else _join(node.base, reference)
        uri, fragment = urldefrag(whole)
        resource = self._resources.get(uri)
        if resource is None:
            raise SchemaError(
                node.path, keyword, f"{reference!r} is not in this schema, and nothing is fetched"
            )
        schema, path, base = resource
        if not fragment:
            return self._intern(schema, path, base)
        if not fragment.startswith("/"):
            anchored = self._anchors.get((uri, unquote(fragment)))
            if anchored is None:
                raise SchemaError(node.path, keyword, f"{reference!r} names no anchor here")
            return self._intern(*anchored, uri)
        for part in fragment[1:].split("/"):
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            schema = _step(schema, key, node.path, keyword, reference)
            path = _deeper(path, key)
            base = _base_of(schema, base)
        return self._intern(schema, path, base)

    def _intern(self, schema: object, path: str, base: str) -> int:
        if isinstance(schema, bool):
            return TRUE if schema else FALSE
        if not isinstance(schema, dict):
            raise SchemaError(path, "", "a schema must be an object or a boolean")
        base = _base_of(schema, base)
        key = (base, json.dumps(schema))
        number = self._known.get(key)
        if number is None:
            number = self._known[key] = len(self._nodes)
            if number >= self._limits.schema_nodes:
                raise SchemaError(
                    path, "", f"the schema has more than {self._limits.schema_nodes} parts"
                )
            self._nodes.append(Node(number, schema, path, base))
        return number

    def _collect(self, schema: object, path: str, base: str) -> None:
        """Find every `$id` and `$anchor` below `schema`."""
        pending = [(schema, path, base)]
        seen = 0
        while pending:
            value, path, base = pending.pop()
            if not isinstance(value, dict):
                continue
            seen += 1
            if seen > self._limits.schema_nodes:
                message = f"the schema has more than {self._limits.schema_nodes} parts"
                raise SchemaError(path, "", message)
            identity = _base_of(value, base)
            if identity != base or path == "#":
                base = identity
                self._resources.setdefault(base, (value, path, base))
            for keyword in ("$anchor", "$dynamicAnchor"):
                if isinstance(value.get(keyword), str):
                    self._anchors.setdefault((base, value[keyword]), (value, path))
            pending.extend((child, place, base) for child, place in _children(value, path))


def _check_depth(schema: object, limit: int) -> None:
    pending = [(schema, 1)]
    while pending:
        value, depth = pending.pop()
        if depth > limit:
            raise SchemaError("#", "", f"the schema is nested deeper than {limit} levels")
        if isinstance(value, dict):
            pending.extend((part, depth + 1) for part in value.values())
        elif isinstance(value, list):
            pending.extend((part, depth + 1) for part in value)


def _children(schema: dict[str, Any], path: str) -> list[tuple[object, str]]:
    found: list[tuple[object, str]] = []
    for keyword, value in schema.items():
        place = _deeper(path, keyword)
        if keyword in _SCHEMA_MAPS and isinstance(value, dict):
            found += [(part, _deeper(place, name)) for name, part in value.items()]
        elif keyword in _SCHEMA_LISTS and isinstance(value, list):
            found += [(part, _deeper(place, index)) for index, part in enumerate(value)]
        elif keyword in _SCHEMAS:
            found.append((value, place))
    return found


def _deeper(path: str, step: str | int) -> str:
    return f"{path}/{str(step).replace('~', '~0').replace('/', '~1')}"


def _join(base: str, reference: str) -> str:
    try:
        return urljoin(base, reference)
    except ValueError:
        return reference


def _base_of(schema: object, base: str) -> str:
    identity = schema.get("$id") if isinstance(schema, dict) else None
    if not isinstance(identity, str):
        return base
    try:
        return urldefrag(_join(base, identity)).url
    except ValueError:
        return base


def _step(schema: object, key: str, path: str, keyword: str, reference: str) -> object:
    if isinstance(schema, dict) and key in schema:
        return schema[key]
    if isinstance(schema, list) and key.isascii() and key.isdigit() and int(key) < len(schema):
        return schema[int(key)]
    raise SchemaError(path, keyword, f"{reference!r} leads nowhere: there is no {key!r}")
