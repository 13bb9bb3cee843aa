"""Reading models from disk or hub: safetensors, GGUF, the embedded default."""
