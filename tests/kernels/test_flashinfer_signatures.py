"""The real FlashInfer takes the calls that we make; where it is installed, no GPU is needed."""

import inspect

import pytest

flashinfer = pytest.importorskip("flashinfer")

OPTIONS = {
    "window_left": -1,
    "logits_soft_cap": None,
    "sm_scale": 1.0,
    "q_data_type": None,
    "kv_data_type": None,
    "o_data_type": None,
}
SCALES = {"k_scale": 1.0, "v_scale": 1.0}


def test_decode_wrapper() -> None:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper
    buffers = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")
    inspect.signature(wrapper).bind(
        None, "NHD", use_cuda_graph=True, use_tensor_cores=True, **dict.fromkeys(buffers)
    )
    # `plan` passes what follows page_size on.
    plan = inspect.signature(wrapper._plan_impl)
    plan.bind(None, None, None, None, 1, 1, 1, 1, **OPTIONS)
    inspect.signature(wrapper.run).bind(None, None, (None, None), out=None, **SCALES)


def test_prefill_wrapper() -> None:
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper
    inspect.signature(wrapper).bind(None, "NHD")
    plan = inspect.signature(wrapper.plan)
    plan.bind(None, None, None, None, None, 1, 1, 1, 1, causal=True, **OPTIONS)
    inspect.signature(wrapper.run).bind(None, None, (None, None), out=None, **SCALES)
