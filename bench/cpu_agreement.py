r"""How often do the CPU kernels choose the token that float32 chooses?

Teacher-forced on real prompts: this engine in float32 continues each prompt greedily; then, given
every prefix of that text, each of the following names its best token, which is compared with the
best token of `transformers` in float32 on the same prefix:

* this engine in bfloat16, or with what `--arguments` say, on the same weights
* `transformers` in bfloat16, for what that precision costs a plain implementation

`MODEL` is a Hugging Face directory in bfloat16 (`cpu_models.py` makes it), so both sides have the
very same weights and the difference is that of the arithmetic alone. With `--reference FILE.gguf`
the float32 side has the weights of that file before they were rounded to bfloat16.

    python bench/cpu_agreement.py MODEL [--reference FILE.gguf] [--tokens 32] [--json out.json]
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from trunkline import Engine

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.prompts import PROMPTS


@dataclass(frozen=True, slots=True)
class Agreement:
    """Steps at which a way to compute chose as float32 does."""

    name: str
    steps: int
    agreed: int
    largest_gap: float  # of log-probs between the two tokens by float32, where they differ

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return self.agreed / self.steps


def continuations(model: Path, tokens: int) -> list[tuple[list[int], int]]:
    """Each prompt with its greedy continuation, and the prompt's length."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    prompts = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    with Engine(model_path=str(model), dtype="float32") as engine:
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        outputs = engine.generate(input_ids=prompts, sampling_params=sampling)
    return [
        (prompt + output["output_ids"], len(prompt))
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def own_choices(texts: list[tuple[list[int], int]], options: dict[str, Any]) -> list[list[int]]:
    """The best token behind each prefix, by this engine."""
    with Engine(**options) as engine:
        outputs = engine.generate(
            input_ids=[ids for ids, _ in texts],
            sampling_params={"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=1,
        )
    choices = []
    for (_, start), output in zip(texts, outputs, strict=True):
        best = output["meta_info"]["input_top_logprobs"]
        choices.append([entry[0][1] for entry in best[start:]])
    return choices


def logits(texts: list[tuple[list[int], int]], source: Path, dtype: torch.dtype) -> list[Any]:
    """Logits behind each prefix, by `transformers`."""
    where = {"gguf_file": source.name} if source.suffix == ".gguf" else {}
    directory = source.parent if where else source
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, **where)
    with torch.inference_mode():
        return [
            model(torch.tensor([ids])).logits[0, start - 1 : -1].float() for ids, start in texts
        ]


def compare(name: str, exact: list[Any], choices: list[list[int]]) -> Agreement:
    """Count."""
    steps, agreed, gaps = 0, 0, [0.0]
    for rows, chosen in zip(exact, choices, strict=True):
        for row, token in zip(rows.log_softmax(-1), chosen, strict=True):
            steps += 1
            gap = float(row.max() - row[token])
            agreed += gap == 0.0
            gaps.append(gap)
    return Agreement(name, steps, agreed, max(gaps))


def main() -> None:
    """Print the shares, and write them as JSON if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--reference", type=Path, help="default: the model, in float32")
    parser.add_argument("--tokens", type=int, default=32, help="for each of the prompts")
    parser.add_argument("--arguments", type=json.loads, default={}, help="of Engine, as JSON")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    texts = continuations(options.model, options.tokens)
    exact = logits(texts, options.reference or options.model, torch.float32)
    plain = [rows.argmax(-1).tolist() for rows in logits(texts, options.model, torch.bfloat16)]
    ours = {"model_path": str(options.model), "dtype": "bfloat16", **options.arguments}
    results = [
        compare("this engine", exact, own_choices(texts, ours)),
        compare("transformers, bfloat16", exact, plain),
    ]
    for one in results:
        print(
            f"{one.name}: {one.agreed} of {one.steps} steps ({one.share:.2%}); where they differ, "
            f"float32 has the two tokens at most {one.largest_gap:.3f} apart"
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in results], indent=1))


if __name__ == "__main__":
    main()
