"""The whole engine, from files, against `transformers` in float32: greedy tokens, log-probs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.checkpoints import FAMILIES, YARN_ROPE, TinyCheckpoint
from tests.gguf_files import ARCHITECTURES, TinyGguf
from transformers import AutoModelForCausalLM

from trunkline import Engine

pytestmark = pytest.mark.filterwarnings("ignore")  # deprecations inside of transformers and torch

NEW_TOKENS = 40
MODELS: dict[str, TinyCheckpoint] = {
    **{family: TinyCheckpoint(family=family) for family in FAMILIES},
    **{
        f"{family}-{'tied' if tied else 'untied'}": TinyCheckpoint(
            family=family, config={"tie_word_embeddings": tied}, seed=2
        )
        for family in FAMILIES
        for tied in (True, False)
        if tied != bool(TinyCheckpoint(family=family).config_values["tie_word_embeddings"])
    },
    "llama-sharded": TinyCheckpoint(num_shards=3),
    "qwen3-sharded-tied": TinyCheckpoint(
        family="qwen3", num_shards=4, config={"tie_word_embeddings": True}
    ),
    "llama-pickled": TinyCheckpoint(weight_format="pt", num_shards=2),
    "llama-biases": TinyCheckpoint(config={"attention_bias": True, "mlp_bias": True}),
    "llama-yarn": TinyCheckpoint(config={"rope_scaling": YARN_ROPE}),
    "qwen3-biases": TinyCheckpoint(family="qwen3", config={"attention_bias": True}),
    "llama-one-kv-head": TinyCheckpoint(config={"num_key_value_heads": 1}),
}


def prompts() -> list[list[int]]:
    """Lengths around the page size, the windows and a step's budget."""
    rng = np.random.default_rng(5)
    lengths = (1, 2, 15, 16, 17, 33, 64, 100, 150)
    return [rng.integers(5, 300, length).tolist() for length in lengths]


def generated(path: Path) -> list[dict[str, Any]]:
    """What our engine answers to all prompts at once, in chunks of 48, with all log-probs."""
    settings: dict[str, Any] = {"max_total_tokens": 4096, "max_prefill_tokens": 48}
    options = {"dtype": "float32", "quantization": "none", "log_level": "error", **settings}
    with Engine(str(path), **options) as engine:
        answers: list[dict[str, Any]] = engine.generate(
            input_ids=prompts(),
            sampling_params={"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
            return_logprob=True,
            logprob_start_len=0,
        )
    return answers


def assert_greedy(model: torch.nn.Module, answers: list[dict[str, Any]]) -> None:
    """Outputs are the arg-max of the reference's logits, log-probs those of its log-softmax."""
    for prompt, answer in zip(prompts(), answers, strict=True):
        output, meta = answer["output_ids"], answer["meta_info"]
        assert len(output) == NEW_TOKENS
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output])).logits[0]
        assert output == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        entries = meta["input_token_logprobs"] + meta["output_token_logprobs"]
        assert [entry[1] for entry in entries] == prompt + output
        assert entries[0][0] is None
        ids = torch.tensor([entry[1] for entry in entries[1:]])
        expected = torch.log_softmax(logits[:-1], -1).gather(1, ids[:, None])[:, 0]
        values = torch.tensor([entry[0] for entry in entries[1:]])
        torch.testing.assert_close(values, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_directories(tmp_path: Path, name: str) -> None:
    path = MODELS[name].write(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert_greedy(model, generated(path))


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("family", sorted(set(ARCHITECTURES) - {"llama3", "gemma"}))
def test_gguf_files(tmp_path: Path, family: str, kind: str) -> None:
    # What transformers does not read must be the family's default: the head size of qwen3, and of
    # later gemmas what queries are scaled by, which is the head size, caps, pattern and ropes.
    defaults: dict[str, dict[str, Any]] = {
        "qwen3": {"head_dim": 128},
        "gemma2": {
            "head_dim": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        "gemma3": {
            "head_dim": 256,
            "num_hidden_layers": 6,
            "sliding_window_pattern": 6,
            "rope_local_base_freq": 10000.0,
            "rope_scaling": None,
        },
    }
    config = defaults.get(family, {})
    path = tmp_path / "tiny.gguf"
    TinyGguf(family=family, kind=kind, config=config).write(path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    assert_greedy(model, generated(path))
