"""The OpenAPI document as one HTML page: no script, nothing fetched, so it works offline."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any, Final

_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem;
  color: #1d2430; background: #fff }
h2 { margin-top: 2.5rem; border-bottom: 1px solid #d5dae2 }
details { margin: .5rem 0; border: 1px solid #d5dae2; border-radius: 6px; padding: .4rem .8rem }
summary { cursor: pointer }
code, pre { font: 13px/1.45 ui-monospace, monospace; background: #f2f4f7; border-radius: 4px }
code { padding: .1rem .25rem } pre { padding: .6rem; overflow-x: auto }
.method { display: inline-block; min-width: 3.2rem; font-weight: 600; color: #0b5cad }
.note { color: #5b6675; font-size: 13px }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 }
td, th { text-align: left; vertical-align: top; padding: .25rem .6rem .25rem 0;
  border-bottom: 1px solid #e7eaef; overflow-wrap: anywhere }
@media (prefers-color-scheme: dark) {
  body { color: #dde3ec; background: #14181f } code, pre { background: #232a35 }
  details, h2, td, th { border-color: #353e4c } .method { color: #6fb1f5 }
  .note { color: #9aa6b6 } a { color: #6fb1f5 } }
"""
_WHO: Final = {
    "public": "No key needed.",
    "client": "Needs an API key, if the server has any.",
    "admin": "Needs the admin key, if the server has one.",
}
Schema = Mapping[str, Any]


def docs_page(document: Mapping[str, Any]) -> str:
    """Write the page."""
    named = document["components"]["schemas"]
    info = document["info"]
    groups: dict[str, list[str]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            rows = groups.setdefault(operation["tags"][0], [])
            rows.append(_operation(path, method.upper(), operation))
    sections = [f"<h2>{escape(tag)}</h2>{''.join(rows)}" for tag, rows in groups.items()]
    types = [_named(name, schema) for name, schema in named.items()]
    title = f"{escape(info['title'])} {escape(info['version'])}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{title}: API</title><style>{_STYLE}</style></head><body><h1>{title}</h1>"
        f"<p>{_prose(info['description'])}</p>"
        '<p>For programs: <a href="/openapi.json">/openapi.json</a></p>'
        f"{''.join(sections)}<h2>Types</h2>{''.join(types)}</body></html>"
    )


def _operation(path: str, method: str, operation: Mapping[str, Any]) -> str:
    parts = [
        f"<p>{_prose(operation['description'])}</p>" if "description" in operation else "",
        f'<p class="note">{_WHO[operation["x-access"]]}</p>',
        _parameters(operation["parameters"]),
        _body(path, method, operation.get("requestBody")),
        _responses(operation["responses"]),
    ]
    return (
        f'<details id="{escape(operation["operationId"])}"><summary>'
        f'<span class="method">{method}</span> <code>{escape(path)}</code> '
        f"{_prose(operation['summary'])}</summary>{''.join(parts)}</details>"
    )


def _parameters(parameters: Iterable[Mapping[str, Any]]) -> str:
    rows = [
        (f"<code>{escape(one['name'])}</code>", escape(one["in"]), _type(one["schema"]))
        for one in parameters
    ]
    return _table(("parameter", "in", "type"), rows) if rows else ""


def _body(path: str, method: str, body: Mapping[str, Any] | None) -> str:
    if body is None:
        return ""
    [(media_type, content)] = body["content"].items()
    text = f"<p>Body, <code>{escape(media_type)}</code>: {_type(content['schema'])}</p>"
    if "example" in content:
        example = json.dumps(content["example"])
        command = f"curl -X {method} http://localhost:30000{path} \\\n"
        command += f"  -H 'Content-Type: {media_type}' \\\n  -d '{example}'"
        text += f"<pre>{escape(command)}</pre>"
    return text


def _responses(responses: Mapping[str, Any]) -> str:
    rows = []
    for status, response in responses.items():
        kinds = [
            f"<code>{escape(media_type)}</code>: {_type(content['schema'])}"
            for media_type, content in response.get("content", {}).items()
        ]
        rows.append((status, _prose(response["description"]), "<br>".join(kinds)))
    return _table(("status", "when", "body"), rows)


def _named(name: str, schema: Schema) -> str:
    rows = [
        (
            f"<code>{escape(field)}</code>",
            _type(one) + (" required" if field in schema.get("required", ()) else ""),
            _prose(one.get("description", "")),
        )
        for field, one in schema.get("properties", {}).items()
    ]
    about = _prose(schema.get("description", ""))
    fields = _table(("field", "type", ""), rows) if rows else f"<p>{_type(schema)}</p>"
    return (
        f'<details id="type-{escape(name)}"><summary><code>{escape(name)}</code> {about}</summary>'
        f"{fields}</details>"
    )


def _type(schema: Any) -> str:
    """A schema in a few words; what they leave out is in the document."""
    if not isinstance(schema, Mapping) or not schema:
        return "any"
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#type-{name}">{name}</a>'
    if "contentSchema" in schema.get("properties", {}).get("data", {}):
        return f"events of {_type(schema['properties']['data']['contentSchema'])}"
    if "allOf" in schema:
        return _type(schema["allOf"][0])
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(map(_type, schema[key])))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(f"<code>{escape(json.dumps(one))}</code>" for one in values)
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items'))}{_bounds(schema, 'Items')}"
    return f"{escape(str(schema.get('type', 'any')))}{_range(schema)}{_bounds(schema, 'Length')}"


def _range(schema: Schema) -> str:
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    if low is None and high is None:
        return ""
    opening = "(" if low is None or "exclusiveMinimum" in schema else "["
    closing = ")" if high is None or "exclusiveMaximum" in schema else "]"
    return f" in {opening}{_number(low)}, {_number(high)}{closing}"


def _number(value: float | None) -> str:
    return "…" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _bounds(schema: Schema, of: str) -> str:
    low, high = schema.get(f"min{of}"), schema.get(f"max{of}")
    unit = "entries" if of == "Items" else "characters"
    if low is None and high is None:
        return ""
    if high is None:
        return f", at least {low} {unit}"
    return f", {low or 0} to {high} {unit}"


def _prose(text: str) -> str:
    """Text whose `code` is marked as in Markdown."""
    parts = escape(text).split("`")
    return "".join(f"<code>{one}</code>" if odd % 2 else one for odd, one in enumerate(parts))


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    cells = "".join(f"<th>{one}</th>" for one in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{cells}</tr>{body}</table>"
