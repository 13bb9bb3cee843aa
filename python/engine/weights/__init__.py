"""Reading models from disk or hub: safetensors, GGUF, the embedded default."""

from trunkline.engine.weights.open import (
    is_model_from_hub,
    is_tokenizer_from_hub,
    open_checkpoint,
)

__all__ = ["is_model_from_hub", "is_tokenizer_from_hub", "open_checkpoint"]
