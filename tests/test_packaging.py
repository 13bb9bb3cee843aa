"""The wheel and the wheel built from the sdist hold exactly the package's files, and import."""

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
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def shipped_files() -> set[str]:
    """What `git` knows under python/, under the import name."""
    listed = run("git", "ls-files", "--cached", "python").split()
    return {name.replace("python/", "trunkline/", 1) for name in listed}


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
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel of the tree and the wheel of its sdist."""
    out = tmp_path_factory.mktemp("wheels")
    direct = build(ROOT, out / "direct")
    run(sys.executable, "-m", "maturin", "sdist", "--out", out / "sdist")
    (sdist,) = (out / "sdist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(out / "unpacked", filter="data")
    (unpacked,) = (out / "unpacked").iterdir()
    return {"tree": direct, "sdist": build(unpacked, out / "from_sdist")}


@pytest.mark.parametrize("origin", ["tree", "sdist"])
@pytest.mark.timeout(900)
def test_wheel_holds_the_package(wheels: dict[str, Path], origin: str) -> None:
    wheel = wheels[origin]
    assert "cp311-abi3" in wheel.name
    assert wheel_files(wheel) == shipped_files() | {"trunkline/_core.abi3.so"}


@pytest.mark.timeout(900)
def test_wheel_imports_from_a_clean_environment(wheels: dict[str, Path], tmp_path: Path) -> None:
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    with zipfile.ZipFile(wheels["tree"]) as archive:
        archive.extractall(site)
    # The dependencies of this environment, without its editable trunkline: a .pth adds a path, and
    # the .pth files in that path are not read.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    code = "import trunkline, trunkline._core as c; print(trunkline.__file__, c.__file__)"
    for path in run(python, "-c", code, cwd=tmp_path).split():
        assert Path(path).is_relative_to(site)
    assert "--model-path" in run(python, "-m", "trunkline", "--help", cwd=tmp_path)
