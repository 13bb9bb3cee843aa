"""Reading models from disk or hub: safetensors, GGUF, the embedded default."""

from trunkline.engine.weights.open import open_checkpoint

__all__ = ["open_checkpoint"]
