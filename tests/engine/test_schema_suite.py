"""The JSON-Schema-Test-Suite, from the source distribution of the installed `jsonschema`.

Run it alone for the table of docs/structured-output.md:
`python -m pytest -m slow -s tests/engine/test_schema_suite.py`.
"""

import importlib.metadata
import json
import subprocess
import sys
import tarfile
from collections import defaultdict
from typing import Any

import pytest
from tests.engine.schema_tools import accepts_value

from trunkline.engine.grammar.schema import SchemaError, schema_grammar

MUST_BE_ENFORCED = [
    "anyOf", "const", "enum", "items", "maxItems", "maxLength", "maximum", "minItems", "minLength",
    "minimum", "exclusiveMaximum", "exclusiveMinimum", "pattern", "prefixItems", "properties",
    "required", "type",
]  # fmt: skip


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The groups of each file of the draft."""
    folder = tmp_path_factory.mktemp("suite")
    version = importlib.metadata.version("jsonschema")
    options = ["--no-deps", "--no-binary", "jsonschema", "--dest", str(folder), "--quiet"]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, f"jsonschema=={version}"], check=True
    )
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    tests = next(folder.glob("*/json/tests/draft2020-12"))
    return {path.stem: json.loads(path.read_text()) for path in sorted(tests.glob("*.json"))}


def outcome(name: str, group: dict[str, Any]) -> str:
    """`enforced`, `refused`, or `wrong` with the first value that is treated wrongly.

    The suite's main tests take `format` as an annotation.
    """
    try:
        grammar = schema_grammar(group["schema"], assert_formats=name != "format")
    except SchemaError as error:
        unsatisfiable = error.message == "no value satisfies this schema"
        nothing_valid = not any(test["valid"] for test in group["tests"])
        if unsatisfiable:
            return "enforced" if nothing_valid else "wrong: nothing is accepted"
        return f"refused {error}"
    for test in group["tests"]:
        if accepts_value(grammar, test["data"]) != test["valid"]:
            return f"wrong: {test['description']}"
    return "enforced"


@pytest.mark.slow
def test_every_group_is_enforced_exactly_or_refused(
    suite: dict[str, list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    table: dict[str, dict[str, int]] = {}
    wrong, refused = [], []
    for name, groups in suite.items():
        counts = table[name] = defaultdict(int)
        for group in groups:
            result = outcome(name, group)
            counts[result.split()[0].rstrip(":")] += 1
            if result.startswith("wrong"):
                wrong.append(f"{name}: {group['description']}: {result}")
            elif result.startswith("refused"):
                refused.append((name, result))
    with capsys.disabled():
        print("\n| file | enforced | refused | wrong |\n|---|---|---|---|")
        for name, counts in table.items():
            print(f"| {name} | {counts['enforced']} | {counts['refused']} | {counts['wrong']} |")
    assert wrong == []
    enforced = sum(counts["enforced"] for counts in table.values())
    assert enforced >= 0.8 * sum(map(len, suite.values()))
    assert {name for name, _ in refused} & set(MUST_BE_ENFORCED) == set()
    remote = [text for name, text in refused if name == "ref" and "nothing is fetched" not in text]
    assert remote == [], "only references out of the schema are refused"
