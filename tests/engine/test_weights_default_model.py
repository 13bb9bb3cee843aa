"""The embedded default model: what its file holds."""

from __future__ import annotations

from trunkline.engine.config import ModelOptions
from trunkline.engine.weights import open_checkpoint


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
