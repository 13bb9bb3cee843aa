"""The harness that compiles kernels finds what it is there to find."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]
# A file, because Triton reads the source of kernels.
KERNELS = """
import json
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from tests.kernels.triton.cross_compile import compile_case, problems, recorded_launches


@triton.jit
def fine(x_pointer, count):
    tl.store(x_pointer + tl.arange(0, 64), 1.0)


@triton.jit
def wrong(x_pointer):
    tl.store(x_pointer + tl.arange(0, 3), 1.0)


@triton.jit
def spilling(x_pointer, N: tl.constexpr):
    places = tl.arange(0, N)
    x = tl.load(x_pointer + places)
    tl.store(x_pointer + places, x - tl.sum(x, axis=0))


@triton.jit
def large(x_pointer, N: tl.constexpr):
    tile = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    a = tl.load(x_pointer + tile)
    b = tl.load(x_pointer + N * N + tile)
    tl.store(x_pointer + tile, tl.dot(a, b).to(tl.float16))


x, half = torch.empty(1 << 17), torch.empty(1 << 18, dtype=torch.float16)
target = GPUTarget("cuda", 90, 32)
with recorded_launches("launch", target, may_spill=False) as cases:
    fine[(3,)](x, 16)
    wrong[(1,)](x)
    spilling[(1,)](x, N=16384, num_warps=1)
    large[(1,)](half, N=256, num_warps=8)
print(json.dumps({c.kernel.fn.__name__: problems(compile_case(c, 90), c) for c in cases}))
"""


PROMPTS = """
import json
import torch
from triton.backends.compiler import GPUTarget
from tests.kernels.triton.cross_compile import recorded_launches

from trunkline.kernels.triton.launch import KNOWN_TRAITS, assume_device
from trunkline.kernels.triton.page_list import list_pages
from trunkline.kernels.triton.paged_layer import PagedLayer
from trunkline.kernels.triton.prompt_attention import prompt_attention


def integers(*shape):
    return torch.empty(shape, dtype=torch.int32)


def launch(first):
    slots, lens = integers(8)[first:], integers(8)[first:]
    query, pool = torch.empty(64, 8, 64), torch.empty(9, 16, 2, 64)
    tables, starts = integers(9, 32), integers(9 - first)
    layer = PagedLayer(keys=pool, values=pool, page_tables=tables, scale=1.0)
    prompt_attention(
        query, layer, slots, lens, starts, torch.empty_like(query), max_query_len=64
    )
    list_pages(tables, slots, starts, integers(64))


compiled = []
for first in (0, 1, 4):
    with (
        assume_device(KNOWN_TRAITS[90]),
        recorded_launches("launch", GPUTarget("cuda", 90, 32), may_spill=False) as cases,
    ):
        launch(first)
    compiled.append([[c.name, sorted(map(str, c.attributes.items()))] for c in cases])
print(json.dumps(compiled))
"""


LOG_PROBS = """
import json
from triton.backends.compiler import GPUTarget
from tests.kernels.triton.cases_sample import _step
from tests.kernels.triton.cross_compile import _key, compile_case, recorded_launches

from trunkline.kernels.triton.launch import KNOWN_TRAITS, assume_device

compiled = []
for most in (1, 2, 5, 16, 20, 128):
    with (
        assume_device(KNOWN_TRAITS[90]),
        recorded_launches("launch", GPUTarget("cuda", 90, 32), may_spill=False) as cases,
    ):
        _step(151936, True, most)
    compiled.append([_key(case) for case in cases if "logprobs" in _key(case)])
with (
    assume_device(KNOWN_TRAITS[90]),
    recorded_launches("launch", GPUTarget("cuda", 90, 32), may_spill=False) as cases,
):
    _step(32000, False, 0)
found = [compile_case(case, 90) for case in cases if "logprobs" in _key(case)]
print(json.dumps([[result.error for result in found], *compiled]))
"""


def run(tmp_path: Path, source: str) -> Any:
    script = tmp_path / "kernels.py"
    script.write_text(source)
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_failures_spills_and_too_much_shared_memory_are_found(tmp_path: Path) -> None:
    found = run(tmp_path, KERNELS)
    assert found["fine"] == []
    assert "does not compile" in found["wrong"][0]
    assert "bytes of stack" in found["spilling"][0]
    assert "shared memory, limit is 232448" in found["large"][0]


def test_prompts_behind_any_number_of_decode_rows_compile_once(tmp_path: Path) -> None:
    aligned, *others = run(tmp_path, PROMPTS)
    assert [name for name, _ in aligned] == ["launch/prompt_kernel", "launch/_list_pages_kernel"]
    assert others == [aligned] * 2


def test_log_probs_of_any_number_of_best_ids_compile_once(tmp_path: Path) -> None:
    """And without best ids they compile, too."""
    errors, first, *others = run(tmp_path, LOG_PROBS)
    assert errors == [None] * 4
    assert len(first) == 4
    assert others == [first] * 5
