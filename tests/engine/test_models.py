"""The decoder against transformers, and what loading refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.kernels.driver import Driver, Sequence
from tests.kernels.tiny import (
    FAMILIES,
    MemoryCheckpoint,
    decoder_config,
    memory_checkpoint,
    reference_model,
    tiny_runner,
)

from trunkline.engine.checkpoint import CheckpointError
from trunkline.engine.models.config import RopeConfig
from trunkline.engine.models.rotary import rotary_spec


def prompts(count: int, seed: int, longest: int = 200) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, longest, count)
    return [generator.integers(0, 199, length).tolist() for length in lengths]


def reference_logits(model: torch.nn.Module, sequence: Sequence) -> torch.Tensor:
    """Logits that each output token was chosen from, [outputs, V].

    If the tokens are their arg-max throughout, greedy decoding gives exactly these tokens.
    """
    with torch.inference_mode():
        logits = model(torch.tensor([sequence.tokens])).logits[0]
    return logits[len(sequence.prompt) - 1 : -1]


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers(family: str) -> None:
    runner = tiny_runner(memory_checkpoint(family))
    model = reference_model(family)
    sequences = [Sequence(prompt) for prompt in prompts(3, seed=1)]
    driver = Driver(runner, top_n=20)
    driver.generate(sequences, 64)
    for sequence in sequences:
        logits = reference_logits(model, sequence)
        assert sequence.output == logits.argmax(-1).tolist()
        expected = torch.log_softmax(logits, -1)
        for row, top in enumerate(sequence.tops):
            ids = [token for token, _ in top]
            values = torch.tensor([value for _, value in top])
            torch.testing.assert_close(values, expected[row, ids], atol=1e-4, rtol=1e-4)


def cut_out(names: list[str], family: str = "llama", **changes: object) -> MemoryCheckpoint:
    made = memory_checkpoint(family, **changes)
    for name in names:
        del made.weights[name]
    return made


def first_logits(checkpoint: MemoryCheckpoint) -> list[tuple[int, float]]:
    sequence = Sequence([4, 9, 100])
    Driver(tiny_runner(checkpoint), top_n=50).generate([sequence], 1)
    return sequence.tops[0]


def test_missing_tensors_are_named() -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    with pytest.raises(CheckpointError, match=name):
        tiny_runner(cut_out([name]))


def test_missing_head_of_an_untied_model_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        tiny_runner(cut_out(["lm_head.weight"]))


def test_extra_tensors_are_named() -> None:
    made = memory_checkpoint("llama")
    made.weights["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(48)
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.q_proj\.bias"):
        tiny_runner(made)


def test_wrong_shapes_are_named_with_both_shapes() -> None:
    made = memory_checkpoint("llama")
    made.weights["model.layers.2.mlp.up_proj.weight"] = torch.zeros(79, 48)
    with pytest.raises(CheckpointError, match=r"up_proj\.weight.*\(79, 48\).*\(80, 48\)"):
        tiny_runner(made)


def test_tensors_that_are_listed_but_not_yielded_are_named() -> None:
    class Cut(MemoryCheckpoint):
        def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield from list(self.weights.items())[:-1]

    whole = memory_checkpoint("llama")
    with pytest.raises(CheckpointError, match=list(whole.weights)[-1]):
        tiny_runner(Cut(whole.config, whole.weights))


def test_rotary_buffers_of_old_checkpoints_are_skipped() -> None:
    made = memory_checkpoint("llama")
    expected = first_logits(memory_checkpoint("llama"))
    made.weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    made.weights["model.rotary_emb.inv_freq"] = torch.zeros(4)
    assert first_logits(made) == expected


def test_frequency_factors_equal_the_scaling_that_they_spell_out() -> None:
    """GGUF files bring llama3 scaling as one number per frequency."""
    scaled = rotary_spec(decoder_config("llama-llama3-rope"), 8).inverse_frequencies
    plain = rotary_spec(decoder_config("llama"), 8).inverse_frequencies
    base = rotary_spec(decoder_config("llama", rope=RopeConfig(theta=500000.0)), 8)
    factors = tuple((base.inverse_frequencies / scaled).tolist())
    rope = RopeConfig(kind="factors", theta=500000.0, frequency_factors=factors)
    spelt = rotary_spec(decoder_config("llama", rope=rope), 8).inverse_frequencies
    torch.testing.assert_close(spelt, scaled)
    assert not torch.allclose(spelt, plain)
    few = RopeConfig(kind="factors", frequency_factors=(1.0, 2.0))
    with pytest.raises(CheckpointError, match="2 frequency factors, needs 4"):
        tiny_runner(memory_checkpoint("llama", rope=few))


def test_unknown_architectures_and_activations_are_named() -> None:
    with pytest.raises(CheckpointError, match=r"'GPT9'.*LlamaForCausalLM"):
        tiny_runner(memory_checkpoint("llama", architecture="GPT9"))
    with pytest.raises(CheckpointError, match="'gelu'"):
        tiny_runner(memory_checkpoint("llama", hidden_act="gelu"))


@pytest.mark.parametrize("same", [True, False])
def test_tied_with_a_head_in_the_file_equals_transformers(same: bool, tmp_path: Path) -> None:
    """Transformers uses a head that differs, whatever the config says."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    made = memory_checkpoint("llama-tied")
    table = made.weights["model.embed_tokens.weight"]
    head = table.clone() if same else torch.randn_like(table)
    made.weights["lm_head.weight"] = head
    reference_model("llama-tied").config.save_pretrained(tmp_path)
    save_file(made.weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        expected = torch.log_softmax(model(torch.tensor([[4, 9, 100]])).logits[0, -1], -1)
    for token, value in first_logits(made):
        assert abs(float(expected[token]) - value) < 1e-4


def test_tied_with_only_a_head_in_the_file() -> None:
    made = memory_checkpoint("llama-tied")
    expected = first_logits(memory_checkpoint("llama-tied"))
    made.weights["lm_head.weight"] = made.weights.pop("model.embed_tokens.weight")
    assert first_logits(made) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_can_be_loaded_again(dtype: str) -> None:
    """A part of a fused weight, and a tied table, replaced after use."""
    for family, name, handle, part in (
        ("llama", "model.layers.0.self_attn.k_proj.weight", 2, "k_proj.weight"),
        ("llama-tied", "model.embed_tokens.weight", 0, "weight"),
    ):
        made = memory_checkpoint(family)
        runner = tiny_runner(made, dtype=dtype)
        before = Sequence([4, 9, 100])
        Driver(runner).generate([before], 4)
        made.weights[name] = torch.randn_like(made.weights[name])
        weight = [weight for _, weight in runner.model.weights()][handle]
        with torch.inference_mode():
            weight.load(part, made.weights[name])
        again, fresh = Sequence([4, 9, 100]), Sequence([4, 9, 100])
        Driver(runner).generate([again], 4)
        Driver(tiny_runner(made, dtype=dtype)).generate([fresh], 4)
        assert (again.output, again.logprobs) == (fresh.output, fresh.logprobs)
        assert again.logprobs != before.logprobs


@pytest.mark.parametrize(("asked", "shown"), [(True, True), (False, False), (None, False)])
def test_progress_bar(asked: bool | None, shown: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """None asks for a bar on a terminal only; captured output is none."""
    tiny_runner(memory_checkpoint("llama"), progress=asked)
    assert ("Loading weights" in capsys.readouterr().err) == shown
