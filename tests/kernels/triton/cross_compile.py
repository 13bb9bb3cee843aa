"""Compile every kernel, in every configuration, for GPUs that this machine does not have.

    python -m tests.kernels.triton.cross_compile --targets 90 --quick --report report.json

All of it takes many minutes; `--targets` and `--families` take parts, and what has not changed
since it was compiled comes out of Triton's cache.

Each file `cases_*.py` of this directory yields the launches of one family. A launcher is called
with tensors of the CPU while `JITFunction.run` is replaced, so that what is compiled (types,
constants, divisibility, warps) is what the launcher would run on the device. Then registers and
stack (which is where spilled registers go) are read from the binary, shared memory from Triton's
metadata.

It uses parts of Triton that are not public; they are the same in 3.6 to 3.9.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # decided when Triton is imported
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from trunkline.kernels.triton.launch import KNOWN_TRAITS, DeviceTraits, assume_device

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@dataclass(frozen=True)
class Launch:
    """One call of a launcher with one set of arguments.

    `call` makes tensors on the CPU (`torch.empty`: large ones cost nothing) and calls the launcher.
    """

    name: str
    call: Callable[[], object]
    may_spill: bool = False


@dataclass(frozen=True)
class CompileCase:
    """One kernel in one configuration."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]
    may_spill: bool


@dataclass(frozen=True)
class CompileResult:
    """What a compiled case needs, or why it does not compile."""

    name: str
    target: int
    num_warps: int
    num_stages: int
    registers: int = 0
    stack_bytes: int = 0
    shared_bytes: int = 0
    error: str | None = None


@contextmanager
def recorded_launches(name: str, target: GPUTarget, may_spill: bool) -> Iterator[list[CompileCase]]:
    """Replace the launch of kernels by a note of what would be compiled."""
    cases: list[CompileCase] = []
    backend = make_backend(target)

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kwargs["debug"] = False
        kwargs["instrumentation_mode"] = ""
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, specialization, options = bind(*args, **kwargs)
        options, signature, constants, attributes = kernel._pack_args(
            backend, kwargs, bound, specialization, options
        )
        case = CompileCase(
            f"{name}/{kernel.fn.__name__}",
            kernel,
            signature,
            constants,
            attributes,
            dict(options.__dict__),
            may_spill,
        )
        cases.append(case)

    original = JITFunction.run
    JITFunction.run = record
    try:
        yield cases
    finally:
        JITFunction.run = original


def collect(traits: DeviceTraits, quick: bool, families: list[str]) -> list[CompileCase]:
    """Cases of the families (of all, if none is named), each kernel and configuration once."""
    target = GPUTarget("cuda", traits.capability, 32)
    files = sorted(Path(__file__).parent.glob("cases_*.py"))
    names = [path.stem.removeprefix("cases_") for path in files]
    if unknown := set(families) - set(names):
        raise SystemExit(f"no such families: {sorted(unknown)}; known: {names}")
    cases: dict[str, CompileCase] = {}
    for name in names:
        if families and name not in families:
            continue
        module = importlib.import_module(f"tests.kernels.triton.cases_{name}")
        with assume_device(traits):
            for launch in module.launches(traits, quick):
                label = f"{name}/{launch.name}"
                with recorded_launches(label, target, launch.may_spill) as recorded:
                    launch.call()
                assert recorded, f"{label} launches no kernel"
                for case in recorded:
                    cases.setdefault(_key(case), case)
    return list(cases.values())


def _key(case: CompileCase) -> str:
    parts = (case.signature, case.constants, case.attributes, case.options)
    return f"{case.kernel.__module__}.{case.kernel.fn.__name__} {parts}"


def compile_case(case: CompileCase, capability: int) -> CompileResult:
    """Compile for one target."""
    warps, stages = case.options["num_warps"], case.options["num_stages"]
    source = ASTSource(case.kernel, case.signature, case.constants, case.attributes)
    try:
        target = GPUTarget("cuda", capability, 32)
        compiled = triton.compile(source, target=target, options=case.options)
        registers, stack = _resources(compiled.asm["cubin"])
    except Exception:  # of any kind: the report says which
        return CompileResult(case.name, capability, warps, stages, error=traceback.format_exc())
    shared = compiled.metadata.shared
    return CompileResult(case.name, capability, warps, stages, registers, stack, shared)


def _resources(binary: bytes) -> tuple[int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])


def problems(result: CompileResult, case: CompileCase) -> list[str]:
    """Why the result is not acceptable."""
    if result.error is not None:
        return [f"{result.name} for sm_{result.target} does not compile:\n{result.error}"]
    found = []
    limit = KNOWN_TRAITS[result.target].shared_memory
    if result.shared_bytes > limit:
        found.append(
            f"{result.name} for sm_{result.target} needs {result.shared_bytes} bytes of shared "
            f"memory, limit is {limit}"
        )
    if result.stack_bytes > 0 and not case.may_spill:
        found.append(
            f"{result.name} for sm_{result.target} spills: {result.stack_bytes} bytes of stack"
        )
    return found


def table(results: list[CompileResult]) -> str:
    """Text for people."""
    header = f"{'sm':>4} {'regs':>5} {'stack':>6} {'shared':>7} {'warps':>5} {'stages':>6}  kernel"
    lines = [
        f"{r.target:>4} {r.registers:>5} {r.stack_bytes:>6} {r.shared_bytes:>7} {r.num_warps:>5} "
        f"{r.num_stages:>6}  {r.name}{'' if r.error is None else '  FAILED'}"
        for r in results
    ]
    return "\n".join([header, *lines])


def summary(results: list[CompileResult]) -> str:
    """The most that a kernel of each family needs: a line per family and target."""
    groups: dict[tuple[str, int], list[CompileResult]] = {}
    for result in results:
        groups.setdefault((result.name.split("/")[0], result.target), []).append(result)
    lines = [
        "| family | target | kernels | registers | shared bytes | spill |",
        "|---|---|---|---|---|---|",
    ]
    for (family, target), group in sorted(groups.items()):
        spilling = [one for one in group if one.stack_bytes > 0]
        most = max(one.stack_bytes for one in group)
        spills = f"{len(spilling)}, up to {most} bytes"
        lines.append(
            f"| {family} | {target} | {len(group)} | {max(one.registers for one in group)} | "
            f"{max(one.shared_bytes for one in group)} | {spills if spilling else 'none'} |"
        )
    return "\n".join(lines)


def _compile_share(share: tuple[int, list[CompileCase]]) -> list[CompileResult]:
    capability, cases = share
    return [compile_case(case, capability) for case in cases]


_shares: list[tuple[int, list[CompileCase]]] = []  # inherited by forked workers: cannot be pickled


def _compile_numbered_share(number: int) -> list[CompileResult]:
    return _compile_share(_shares[number])


def compile_all(cases: list[CompileCase], capability: int, workers: int) -> list[CompileResult]:
    """Compile in several processes; results in the order of the cases."""
    _shares[:] = [(capability, cases[number::workers]) for number in range(workers)]
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        parts = pool.map(_compile_numbered_share, range(workers))
    return [parts[index % workers][index // workers] for index in range(len(cases))]


def main() -> int:
    """Compile, print the table, write the report; return 1 if something is not acceptable."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", type=int, nargs="+", default=sorted(KNOWN_TRAITS))
    parser.add_argument("--quick", action="store_true", help="a small matrix")
    parser.add_argument("--families", nargs="+", default=[], help="names of files cases_NAME.py")
    parser.add_argument("--report", type=Path, help="JSON file to write")
    parser.add_argument("--workers", type=int, default=min(4, os.cpu_count() or 1))
    arguments = parser.parse_args()
    results, found = [], []
    for capability in arguments.targets:
        cases = collect(KNOWN_TRAITS[capability], arguments.quick, arguments.families)
        for case, result in zip(
            cases, compile_all(cases, capability, arguments.workers), strict=True
        ):
            results.append(result)
            found += problems(result, case)
    print(table(results))
    print(summary(results))
    print(f"{len(results)} kernels compiled with Triton {triton.__version__}")
    if arguments.report is not None:
        arguments.report.write_text(json.dumps([asdict(r) for r in results], indent=1))
    print("\n".join(found), file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
