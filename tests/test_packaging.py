"""Wheel and sdist hold exactly what they should, and the wheel imports and runs."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    words = [str(part) for part in command]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def tracked_files(*folders: str) -> set[str]:
    return set(run("git", "ls-files", "--cached", *folders).split())


def shipped_files() -> set[str]:
    """What `git` knows under python/, under the import name."""
    return {name.replace("python/", "trunkline/", 1) for name in tracked_files("python")}


def wheel_files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if name.startswith("trunkline/")}


def build(source: Path, out: Path, *options: str) -> Path:
    target = ROOT / "target"
    run(
        *(sys.executable, "-m", "maturin", "build", "--release", "--quiet", "--out", out),
        *("--interpreter", sys.executable, "--target-dir", target, *options),
        cwd=source,
    )
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the tree."""
    return build(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked sdist."""
    out = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "maturin", "sdist", "--out", out)
    (sdist,) = out.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(out / "unpacked", filter="data")
    (unpacked,) = (out / "unpacked").iterdir()
    return unpacked


def check_contents(wheel: Path) -> None:
    assert "cp311-abi3" in wheel.name
    assert wheel_files(wheel) == shipped_files() | {"trunkline/_core.abi3.so"}


@pytest.mark.timeout(900)
def test_wheel_holds_the_package(wheel: Path) -> None:
    check_contents(wheel)


def test_sdist_holds_what_a_build_reads(source: Path) -> None:
    sources = {name for name in tracked_files("rust") if "/src/" in name or "Cargo.toml" in name}
    sources |= {"Cargo.toml", "Cargo.lock", "pyproject.toml", "LICENSE", "README.md"}
    missing = [name for name in sorted(sources) if not (source / name).is_file()]
    assert missing == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_wheel_of_the_sdist_holds_the_package(source: Path, tmp_path: Path) -> None:
    check_contents(build(source, tmp_path))


@pytest.mark.timeout(900)
def test_wheel_imports_from_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel)
    # The dependencies of this environment, without its editable trunkline: a .pth adds a path, and
    # the .pth files in that path are not read.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    code = "import trunkline, trunkline._core as c; print(trunkline.__file__, c.__file__)"
    for path in run(python, "-E", "-c", code, cwd=tmp_path).split():
        assert Path(path).is_relative_to(site)
    assert "--model-path" in run(python, "-E", "-m", "trunkline", "--help", cwd=tmp_path)
    assert "--model-path" in run(environment / "bin" / "engine-serve", "--help", cwd=tmp_path)
    assert "--worker-urls" in run(environment / "bin" / "engine-router", "--help", cwd=tmp_path)
