"""Sampling and log-probs of the reference backend.

Everything that is not needed is skipped: greedy samples are an arg-max, noise is computed only for
ids that can still win, sorting only for samples that cut by rank. A sample's result depends on its
own logits and parameters alone.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trunkline.kernels.interface import FloatArray, IntArray, SampleInputs, SampleOutputs
from trunkline.kernels.torch_reference.logprobs import LogProbs, fixed_sum
from trunkline.kernels.torch_reference.philox import GUMBEL_MAX, GUMBEL_MIN, gumbel_blocks

MIN_TEMPERATURE = 1e-6  # below: greedy
TOP_CANDIDATES = 1024  # logits that are sorted before all of them are
NOISE_BLOCKS = 1 << 14  # Philox blocks at once: what stays in cache

IndexArray = npt.NDArray[np.int64]


def sample(logits: torch.Tensor, inputs: SampleInputs) -> SampleOutputs:
    """See `Backend.sample`.

    Args:
        logits: [L, V] float32; kept as they are.
        inputs: what is drawn.
    """
    finite = _finite_rows(logits)
    clean = torch.where(finite[:, None], logits, 0.0) if not bool(finite.all()) else logits
    token_ids, possible = _draw(clean, inputs)
    probs = LogProbs(_processed(clean, inputs), inputs, token_ids)
    return SampleOutputs(
        token_ids=token_ids,
        logit_finite=finite.cpu().numpy(),
        sample_possible=possible,
        sampled_logprobs=probs.sampled(),
        score_logprobs=probs.scored(),
        top_ids=probs.top_ids,
        top_logprobs=probs.top_values,
    )


def _finite_rows(logits: torch.Tensor) -> torch.Tensor:
    if logits.shape[0] == 0:
        return torch.ones(0, dtype=torch.bool, device=logits.device)
    lowest, highest = torch.aminmax(logits, dim=-1)  # both are NaN if any element is
    return torch.isfinite(lowest) & torch.isfinite(highest)


def _draw(logits: torch.Tensor, inputs: SampleInputs) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    device = logits.device
    num_samples = inputs.logit_index.size
    if num_samples == 0:
        return np.zeros(0, np.int32), np.ones(0, np.bool_)
    rows = logits.index_select(0, _index(inputs.logit_index, device))
    adjust_logits(rows, inputs)
    best = rows.amax(-1)
    possible = torch.isfinite(best)
    token_ids = rows.argmax(-1)  # the lowest id among equals
    random = np.flatnonzero(inputs.temperature >= MIN_TEMPERATURE)
    if random.size:
        chosen = _index(random, device)
        drawn = _draw_random(rows.index_select(0, chosen), inputs, random)
        token_ids.index_copy_(0, chosen, drawn)
    return token_ids.to(torch.int32).cpu().numpy(), possible.cpu().numpy()


def adjust_logits(rows: torch.Tensor, inputs: SampleInputs) -> None:
    """Apply penalties, suppression, grammar mask and bias, in this order, in place.

    Args:
        rows: [S, V] float32, one row per sample.
        inputs: the step's sampling.
    """
    device = rows.device
    counted = (_index(inputs.counted_rows, device), _index(inputs.counted_ids, device))
    if inputs.counted_rows.size:
        counts = _float(inputs.counts, device)
        frequency = _float(inputs.frequency_penalty, device)[counted[0]]
        presence = _float(inputs.presence_penalty, device)[counted[0]]
        rows[counted] -= counts * frequency + presence
    if inputs.suppressed_rows.size:
        at = (_index(inputs.suppressed_rows, device), _index(inputs.suppressed_ids, device))
        rows[at] = -torch.inf
    if inputs.counted_rows.size:
        factor = _float(inputs.repetition_penalty, device)[counted[0]]
        values = rows[counted]
        rows[counted] = torch.where(values > 0, values / factor, values * factor)
    if inputs.masks is not None and inputs.mask_rows.size:
        _apply_masks(rows, inputs.masks, _index(inputs.mask_rows, device))
    if inputs.bias_rows.size:
        at = (_index(inputs.bias_rows, device), _index(inputs.bias_ids, device))
        rows.index_put_(at, _float(inputs.bias_values, device), accumulate=True)


def _processed(logits: torch.Tensor, inputs: SampleInputs) -> torch.Tensor:
    """Logits whose softmax is what log-probs are of: `logits`, except for processed samples."""
    which = inputs.processed_rows
    if which.size == 0:
        return logits
    device = logits.device
    rows = logits.index_select(0, _index(inputs.logit_index, device))
    adjust_logits(rows, inputs)
    temperature = np.where(inputs.temperature >= MIN_TEMPERATURE, inputs.temperature, 1.0)
    best = rows.amax(-1, keepdim=True)
    scaled = (rows - best) / _float(temperature, device)[:, None]
    which = which[torch.isfinite(best[:, 0]).cpu().numpy()[which]]  # others have no tokens left
    processed = logits.clone()
    at = _index(inputs.logit_index[which], device)
    processed[at] = scaled.index_select(0, _index(which, device))
    return processed


def _apply_masks(rows: torch.Tensor, masks: IntArray, at: torch.Tensor) -> None:
    words = torch.from_numpy(np.ascontiguousarray(masks)).to(rows.device)
    bits = torch.arange(32, device=rows.device, dtype=torch.int32)
    allowed = ((words[:, :, None] >> bits) & 1).view(words.shape[0], -1)[:, : rows.shape[1]] != 0
    rows[at] = rows[at].masked_fill(~allowed, -torch.inf)


def _draw_random(rows: torch.Tensor, inputs: SampleInputs, which: IndexArray) -> torch.Tensor:
    device = rows.device
    temperature = _float(inputs.temperature[which], device)
    # The best logit becomes 0 before the division: no temperature can overflow it.
    scaled = (rows - rows.amax(-1, keepdim=True)) / temperature[:, None]
    scaled.nan_to_num_(nan=0.0, neginf=-torch.inf)  # a sample with nothing left is reported
    cut_to_top(scaled, inputs.top_k[which], inputs.top_p[which])
    min_p = inputs.min_p[which]
    if (min_p > 0).any():
        # In float64: the rounded result is the same on every device.
        least = np.maximum(min_p, np.float32(1e-38)).astype(np.float64)
        lowest = torch.from_numpy(np.log(least).astype(np.float32)).to(device)
        lowest = torch.where(_float(min_p, device) > 0, lowest, -torch.inf)
        scaled.masked_fill_(scaled < lowest[:, None], -torch.inf)
    seed = torch.from_numpy(inputs.seed[which]).to(device)
    position = _index(inputs.position[which], device)
    return gumbel_argmax(scaled, seed, position)


def cut_to_top(scaled: torch.Tensor, top_k: IntArray, top_p: FloatArray) -> None:
    """Set everything but each row's most likely ids to -inf, in place.

    Kept are the `top_k` largest (0: all), and of them the fewest whose probability reaches `top_p`;
    among equals the lower id comes first. At least one is kept.
    """
    vocabulary = scaled.shape[1]
    limits = np.where((top_k <= 0) | (top_k > vocabulary), vocabulary, top_k)
    which = np.flatnonzero((limits < vocabulary) | (top_p < 1.0))
    if which.size == 0:
        return
    device = scaled.device
    rows = scaled.index_select(0, _index(which, device))
    limits, top_p = limits[which], top_p[which]
    keep = np.zeros(which.size, np.int64)
    pending = np.arange(which.size)
    for width in sorted({min(TOP_CANDIDATES, vocabulary), vocabulary}):
        part = rows.index_select(0, _index(pending, device))
        counts = _count_kept(part, width, limits[pending], top_p[pending])
        keep[pending] = counts
        pending = pending[counts < 0]
        if pending.size == 0:
            break
    scaled.index_copy_(0, _index(which, device), _keep_largest(rows, keep))


def _count_kept(rows: torch.Tensor, width: int, limits: IntArray, top_p: FloatArray) -> IndexArray:
    """How many of each row's largest to keep; -1 where `width` sorted values cannot tell."""
    device = rows.device
    limit = _index(limits, device)[:, None]
    rank = torch.arange(width, device=device)
    mass = rows.topk(width).values.double().exp_().masked_fill_(rank >= limit, 0.0)
    running = mass.cumsum(-1)
    complete = limit <= width
    total = torch.where(complete, running[:, -1:], fixed_sum(rows.double().exp_()))
    target = torch.from_numpy(top_p.astype(np.float64)).to(device)[:, None] * total
    # Kept while the mass before it falls short of the target.
    short = (running - mass < target) & (rank < limit)
    count = short.sum(-1, keepdim=True).clamp_(min=1)
    cut = target < total
    reached = (limit == rows.shape[1]) & (running[:, -1:] >= target)
    known = ~cut | complete | reached
    count = torch.where(known, torch.where(cut, count, limit), -1)
    counts: IndexArray = count[:, 0].cpu().numpy()
    return counts


def _keep_largest(rows: torch.Tensor, keep: IndexArray) -> torch.Tensor:
    counts = _index(keep, rows.device)
    threshold = rows.topk(int(keep.max())).values.gather(1, counts[:, None] - 1)
    above = rows > threshold
    equal = rows == threshold
    room = counts[:, None] - above.sum(-1, keepdim=True)
    kept = above | (equal & (equal.cumsum(-1) <= room))
    return rows.masked_fill(~kept, -torch.inf)


def gumbel_argmax(scaled: torch.Tensor, seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Draw an id per row with probability proportional to `exp(scaled)`.

    Args:
        scaled: [n, V] float32, the best of each row is 0.
        seed: [n] int64.
        position: [n] int64.

    Returns:
        [n] int64.
    """
    num_rows, vocabulary = scaled.shape
    blocks = -(-vocabulary // 4)
    padded = torch.nn.functional.pad(scaled, (0, blocks * 4 - vocabulary), value=-math.inf)
    padded = padded.view(num_rows, blocks, 4)
    # An id wins only if its best noise beats the best id's worst noise.
    alive = (padded >= GUMBEL_MIN - GUMBEL_MAX).any(-1)
    row, block = alive.nonzero(as_tuple=True)
    scores = torch.full_like(padded, -math.inf)
    for rows, ids in zip(
        torch.split(row, NOISE_BLOCKS), torch.split(block, NOISE_BLOCKS), strict=True
    ):
        noise = gumbel_blocks(ids, position[rows], seed[rows])
        scores[rows, ids] = padded[rows, ids] + noise
    return scores.view(num_rows, -1).argmax(-1)


def _index(array: npt.NDArray[np.integer[Any]], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int64)).to(device)


def _float(array: FloatArray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.float32)).to(device)
