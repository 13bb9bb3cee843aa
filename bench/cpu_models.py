r"""Make the models of the CPU comparison from one GGUF file: the same weights for all engines.

From `FILE.gguf` come, in `--out`: `NAME/` (a Hugging Face directory in bfloat16, for this engine
and vLLM), `NAME-bf16.gguf`, `NAME-q8_0.gguf` and `NAME-q4_0.gguf` (for llama.cpp, and the packed
forms of this engine) and `NAME-openvino/` (fp16, for OpenVINO GenAI).

    python bench/cpu_models.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf --name smollm2-135m \
        --out models --llama-cpp llama.cpp [--openvino-python openvino/bin/python]

Needs `transformers` and `gguf`; `--llama-cpp` is a source tree built into its `build` folder.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

GGUF_TYPES = ("bf16", "q8_0", "q4_0")


def dequantise(gguf: Path, directory: Path) -> None:
    """Write the GGUF file's weights, rounded to bfloat16, as a Hugging Face directory."""
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # A fresh module does not remember that it was quantised, which would be written out with it.
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(loaded.state_dict())
    model.to(torch.bfloat16).save_pretrained(directory)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(directory)
    _repeat_rope_theta(directory / "config.json")


def _repeat_rope_theta(path: Path) -> None:
    """Write `rope_theta` where readers of older configurations look for it, too."""
    config = json.loads(path.read_text())
    config.setdefault("rope_theta", config.get("rope_parameters", {}).get("rope_theta", 10_000.0))
    path.write_text(json.dumps(config, indent=1))


def to_gguf(gguf: Path, directory: Path, llama_cpp: Path) -> None:
    """Convert to GGUF in bfloat16, and quantise that."""
    quantiser = [str(llama_cpp / "build/bin/llama-quantize"), "--allow-requantize", "--pure"]
    source = gguf
    for kind in GGUF_TYPES:
        target = directory.with_name(f"{directory.name}-{kind}.gguf")
        # Pure: every matrix has this type, the head too.
        subprocess.run([*quantiser, str(source), str(target), kind], check=True)
        if kind == "bf16":
            source = target


def to_openvino(directory: Path, python: Path) -> None:
    """Export with optimum-intel, installed beside `python`."""
    exporter = [str(python.parent / "optimum-cli"), "export", "openvino", "--model"]
    task = ["--task", "text-generation-with-past", "--weight-format", "fp16"]
    target = directory.with_name(f"{directory.name}-openvino")
    subprocess.run([*exporter, str(directory), *task, str(target)], check=True)


def main() -> None:
    """Make what is not there yet."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--llama-cpp", type=Path, help="source tree, with its build folder")
    parser.add_argument("--openvino-python", type=Path)
    arguments = parser.parse_args()
    directory = arguments.out / arguments.name
    if not (directory / "config.json").exists():
        dequantise(arguments.gguf, directory)
    if arguments.llama_cpp is not None:
        to_gguf(arguments.gguf, directory, arguments.llama_cpp)
    if arguments.openvino_python is not None:
        to_openvino(directory, arguments.openvino_python)


if __name__ == "__main__":
    main()
