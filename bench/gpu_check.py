"""Does the CUDA backend work on this GPU, and how close does it come to what the GPU can do?

    python bench/gpu_check.py [--json gpu_check.json]    on a GPU, a few minutes
    python bench/gpu_check.py --dry-run                  on a CPU: the same paths, interpreted

It needs torch with CUDA, Triton and NumPy, this repository, and no network: weights are random and
made on the device. The exit status is 1 if a result is wrong or a goal is missed. `docs/gpu.md`
says how to bring it to a machine, and what has been found.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))


def main() -> int:
    """Run all checks and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dry-run", action="store_true", help="small, on a CPU, interpreted")
    parser.add_argument("--only", choices=("kernels", "decode"), help="a part of the checks")
    parser.add_argument("--json", type=Path, help="write the findings to this file")
    arguments = parser.parse_args()
    if arguments.dry_run:
        # Read when Triton is imported, so nothing that loads it is imported above.
        os.environ["TRITON_INTERPRET"] = "1"
    import gpu_kernels
    import gpu_model
    import gpu_sampling
    import torch
    import triton
    from gpu_timing import Report, measure_ceilings

    if not arguments.dry_run and not torch.cuda.is_available():
        print("torch sees no CUDA device here; --dry-run runs the same paths on a CPU")
        return 2
    started_at = time.monotonic()
    device = torch.device("cpu" if arguments.dry_run else "cuda")
    dtype = torch.float32 if arguments.dry_run else torch.bfloat16
    name = platform.processor() if arguments.dry_run else torch.cuda.get_device_name(device)
    ceilings = measure_ceilings(device, dtype)
    print(
        f"{name}: torch {torch.__version__}, triton {triton.__version__}, Python "
        f"{platform.python_version()}; copies {ceilings.bytes_per_s / 1e12:.2f} TB/s, multiplies "
        f"{ceilings.operations_per_s / 1e12:.0f} TFLOP/s"
    )
    report = Report()
    with torch.inference_mode():
        if arguments.only != "decode":
            sizes = gpu_kernels.SMALL if arguments.dry_run else gpu_kernels.LARGE
            gpu_kernels.check_kernels(report, device, dtype, sizes, ceilings)
            rows, vocabulary = (3, 500) if arguments.dry_run else (256, 128_256)
            gpu_sampling.check_draws(report, device, rows, vocabulary, ceilings)
        if arguments.only != "kernels":
            trial = gpu_model.SMALL if arguments.dry_run else gpu_model.LARGE
            gpu_model.check_reference(report, device)
            gpu_model.check_decoding(report, device, dtype, trial, ceilings)
    print(f"{'passed' if report.passed else 'FAILED'} in {time.monotonic() - started_at:.0f} s")
    if arguments.json:
        facts = {
            "device": name,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "dry_run": arguments.dry_run,
            "copy_bytes_per_s": ceilings.bytes_per_s,
            "operations_per_s": ceilings.operations_per_s,
            "findings": report.as_json(),
        }
        arguments.json.write_text(json.dumps(facts, indent=2) + "\n")
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
