"""`StepwiseBackend.sample` through the sampling kernels: one step's arrays in, arrays out.

For callers that keep no state on the device; it waits for the results.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trunkline.kernels.interface import IntArray, SampleInputs, SampleOutputs
from trunkline.kernels.triton.sample import (
    Adjustments,
    Counts,
    Draws,
    Entries,
    LogProbRequest,
    LogProbs,
    Masks,
    Samples,
    SlotTables,
    draw,
    log_probs,
)
from trunkline.plan import (
    FREQUENCY_PENALTY,
    MIN_P,
    PRESENCE_PENALTY,
    REPETITION_PENALTY,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)

COLUMNS = 8


def sample(logits: torch.Tensor, inputs: SampleInputs) -> SampleOutputs:
    """See `StepwiseBackend.sample`.

    Args:
        logits: [L, V] float32, rows contiguous; kept as they are.
        inputs: what is drawn; every sample is a slot of its own.
    """
    device = logits.device
    num_samples = inputs.logit_index.size
    samples = Samples(
        logit_index=_int32(inputs.logit_index, device),
        slots=torch.arange(num_samples, dtype=torch.int32, device=device),
        positions=_int32(inputs.position, device),
    )
    slots = _slot_tables(inputs, device)
    draws = draw(logits, samples, slots, _adjustments(inputs, logits))
    request = _request(inputs, device)
    if request is None:
        return _outputs(inputs, draws, None)
    return _outputs(inputs, draws, log_probs(draws, samples.logit_index, request))


def _slot_tables(inputs: SampleInputs, device: torch.device) -> SlotTables:
    floats = np.zeros((inputs.logit_index.size, COLUMNS), np.float32)
    for column, values in (
        (TEMPERATURE, inputs.temperature),
        (TOP_P, inputs.top_p),
        (MIN_P, inputs.min_p),
        (FREQUENCY_PENALTY, inputs.frequency_penalty),
        (PRESENCE_PENALTY, inputs.presence_penalty),
        (REPETITION_PENALTY, inputs.repetition_penalty),
    ):
        floats[:, column] = values
    ints = np.zeros((inputs.logit_index.size, COLUMNS), np.int32)
    ints[:, TOP_K] = inputs.top_k
    return SlotTables(
        floats=torch.from_numpy(floats).to(device),
        ints=torch.from_numpy(ints).to(device),
        seeds=torch.from_numpy(inputs.seed.astype(np.int64)).to(device),
    )


def _adjustments(inputs: SampleInputs, logits: torch.Tensor) -> Adjustments | None:
    device, num_samples = logits.device, inputs.logit_index.size
    is_adjusted = np.zeros(num_samples, np.int32)
    for rows in (inputs.counted_rows, inputs.mask_rows, inputs.bias_rows, inputs.suppressed_rows):
        is_adjusted[rows] = 1
    if not is_adjusted.any():
        return None
    bias = suppressed = None
    if inputs.bias_rows.size:
        values = torch.from_numpy(inputs.bias_values.astype(np.float32)).to(device)
        bias = _entries(inputs.bias_rows, inputs.bias_ids, device, values)
    if inputs.suppressed_rows.size:
        suppressed = _entries(inputs.suppressed_rows, inputs.suppressed_ids, device, None)
    return Adjustments(
        is_adjusted=_int32(is_adjusted, device),
        counts=_counts(inputs, logits),
        masks=_masks(inputs, device),
        bias=bias,
        suppressed=suppressed,
    )


def _entries(
    rows: IntArray, ids: IntArray, device: torch.device, values: torch.Tensor | None
) -> Entries:
    return Entries(rows=_int32(rows, device), ids=_int32(ids, device), values=values)


def _counts(inputs: SampleInputs, logits: torch.Tensor) -> Counts | None:
    if inputs.counted_rows.size == 0:
        return None
    samples, lane_of_entry = np.unique(inputs.counted_rows, return_inverse=True)
    lanes = np.full(inputs.logit_index.size, -1, np.int32)
    lanes[samples] = np.arange(samples.size)
    table = np.zeros((samples.size, logits.shape[1]), np.int32)
    table[lane_of_entry.reshape(-1), inputs.counted_ids] = inputs.counts
    return Counts(lanes=_int32(lanes, logits.device), table=_int32(table, logits.device))


def _masks(inputs: SampleInputs, device: torch.device) -> Masks | None:
    if inputs.masks is None or inputs.mask_rows.size == 0:
        return None
    rows = np.full(inputs.logit_index.size, -1, np.int32)
    rows[inputs.mask_rows] = np.arange(inputs.mask_rows.size)
    return Masks(rows=_int32(rows, device), words=_int32(inputs.masks, device))


def _request(inputs: SampleInputs, device: torch.device) -> LogProbRequest | None:
    scored = np.diff(inputs.score_offsets)
    is_wanted = ((inputs.top_n > 0) | (scored > 0)).astype(np.int32)
    is_wanted[inputs.logit_index[inputs.logprob_rows]] = 1
    if not is_wanted.any():
        return None
    processed = np.full(is_wanted.size, -1, np.int32)
    processed[inputs.logit_index[inputs.processed_rows]] = inputs.processed_rows
    score_rows = np.repeat(np.arange(is_wanted.size, dtype=np.int32), scored)
    return LogProbRequest(
        is_wanted=_int32(is_wanted, device),
        top_n=_int32(inputs.top_n, device),
        max_top_n=int(inputs.top_n.max(initial=0)),
        score_rows=_int32(score_rows, device),
        score_ids=_int32(inputs.score_ids, device),
        processed_sample=_int32(processed, device) if inputs.processed_rows.size else None,
    )


def _outputs(inputs: SampleInputs, draws: Draws, found: LogProbs | None) -> SampleOutputs:
    top_ids, top_values = [np.zeros(0, np.int32)], [np.zeros(0, np.float32)]
    if found is not None and found.top_ids is not None and found.top_values is not None:
        all_ids, all_values = found.top_ids.cpu().numpy(), found.top_values.cpu().numpy()
        for row, count in enumerate(inputs.top_n.tolist()):
            top_ids.append(all_ids[row, :count])
            top_values.append(all_values[row, :count])
    nothing = np.zeros(0, np.float32)
    sampled = scored = nothing
    if found is not None:
        sampled = found.sampled.cpu().numpy()[inputs.logprob_rows]
        scored = nothing if found.scored is None else found.scored.cpu().numpy()
    return SampleOutputs(
        token_ids=draws.token_ids.cpu().numpy(),
        logit_finite=draws.logit_finite.cpu().numpy() != 0,
        sample_possible=draws.sample_possible.cpu().numpy() != 0,
        sampled_logprobs=sampled,
        score_logprobs=scored,
        top_ids=np.concatenate(top_ids),
        top_logprobs=np.concatenate(top_values),
    )


def _int32(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32)).to(device)
