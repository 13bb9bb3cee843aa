"""Triton kernels of the CUDA backend, and the launchers that run them.

A launcher is a plain function over tensors. It writes `out` tensors, or returns fresh ones whose
shapes the host knows; it never synchronises, reads device values, or lets its grid depend on them,
so every launch can be captured in a CUDA graph. Nothing is autotuned: configurations stand in a
table per file.

launch              what all files share
norm, activation    RMS norm with its residual, gate/up activation, both also to fp8
matmul, fp8         the deterministic linear; fp8 linears with one scale per row
routing, moe        which experts get which tokens; grouped products and their combination
rotary              norm of queries and keys, rotary encoding, KV write
kv_pages, fp8_bits  pools and page tables as kernels see them; fp8 by its bits
paged_layer         what every attention kernel is told of a layer
attention_parts     one tile of keys, partial results and their sum
decode_attention    one query token per row, KV split over programs
prompt_attention    prompts in chunks over pages
unified_attention   both in one reduction order
page_copy           page moves
sample              from logits to tokens; its docstring names the files of the family

Importing this package imports nothing; its modules need the `triton` package.
"""
