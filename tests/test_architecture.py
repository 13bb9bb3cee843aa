"""What `docs/architecture.md` says of the code's shape is so."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "python"
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md")),
)
MAY_IMPORT = {
    "kernels": {"kernels", "plan", "_core"},
    "engine": {"engine", "kernels", "plan", "_core"},
}


def imported_parts(path: Path) -> set[str]:
    """First name below `trunkline` of every import in a file, also of those inside functions."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return {name.split(".")[1] for name in names if name.startswith("trunkline.")}


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_imports_go_one_way(part: str) -> None:
    files = list((PACKAGE / part).rglob("*.py"))
    assert files
    for path in files:
        assert imported_parts(path) <= MAY_IMPORT[part], path


def test_two_modules_of_the_engine_know_the_core() -> None:
    users = {path for path in PACKAGE.glob("engine/**/*.py") if "_core" in imported_parts(path)}
    assert users == {PACKAGE / "engine" / "launch.py", PACKAGE / "engine" / "fleet.py"}


def test_the_http_process_does_without_torch() -> None:
    code = "import sys, trunkline.server.serve; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_documents_name_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    named = set(re.findall(r"`((?:python|rust|tests|bench|docs)/[\w/.]*\w)`", text))
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_the_hops_are_the_ones_of_the_table() -> None:
    """Each hop's file imports, calls or implements the next one's."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| (\d) (\w+) \| (.+?) \|", text, re.MULTILINE)
    assert [name for _, name, _ in rows] == [
        *("handler", "client", "channel", "loop", "core", "runner")
    ]
    for _, _, files in rows:
        assert re.search(r"`(python|rust)/[\w/]+\.(py|rs)`", files)
    sources = {name: re.findall(r"`([\w/]+\.\w+)`", files)[0] for _, name, files in rows}
    for hop, call in (
        ("handler", "client.submit("),
        ("client", "self._channel.send("),
        ("channel", "class SocketPort"),
        ("loop", "self._core.plan("),
        ("loop", "self._runner.forward("),
        ("core", "fn plan("),
        ("runner", "self._program.forward("),
    ):
        assert call in (ROOT / sources[hop]).read_text()
