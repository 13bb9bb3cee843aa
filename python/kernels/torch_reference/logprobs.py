"""Log-probs of raw logits: log-softmax in float32, the same bits for a row in any batch."""

from __future__ import annotations

import numpy as np
import torch

from trunkline.kernels.interface import FloatArray, IntArray, SampleInputs

SUM_WIDTH = 512  # summed at once; sums of these are summed again


def fixed_sum(rows: torch.Tensor) -> torch.Tensor:
    """Sum of each row, [n, V] to [n, 1], in an order that does not depend on n.

    One long sum is shared among threads when there are few rows, and then rounds otherwise than
    with many; sums of short pieces never are.
    """
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[1] % SUM_WIDTH))
    return padded.view(rows.shape[0], -1, SUM_WIDTH).sum(-1).sum(-1, keepdim=True)


def log_normaliser(rows: torch.Tensor) -> torch.Tensor:
    """`log(sum(exp(row)))` per row, [n, V] finite float32 to [n, 1]."""
    highest = rows.amax(-1, keepdim=True)
    return highest + fixed_sum((rows - highest).exp_()).log_()


class LogProbs:
    """What one step reports; normalisers are computed only for rows that something is wanted of."""

    def __init__(self, logits: torch.Tensor, inputs: SampleInputs, token_ids: IntArray) -> None:
        self._logits = logits
        self._inputs = inputs
        self._token_ids = token_ids
        scored = np.diff(inputs.score_offsets) > 0
        wanted = (inputs.top_n > 0) | scored
        wanted[inputs.logit_index[inputs.logprob_rows]] = True
        self._normaliser = np.zeros(wanted.size, np.float32)
        rows = np.flatnonzero(wanted)
        for part in np.array_split(rows, -(-rows.size // 64)) if rows.size else ():
            index = torch.from_numpy(part).to(logits.device)
            normaliser = log_normaliser(logits.index_select(0, index))[:, 0]
            self._normaliser[part] = normaliser.cpu().numpy()
        self.top_ids, self.top_values = self._top()

    def sampled(self) -> FloatArray:
        """By `logprob_rows`."""
        rows = self._inputs.logprob_rows
        return self._at(self._inputs.logit_index[rows], self._token_ids[rows])

    def scored(self) -> FloatArray:
        """By `score_ids`."""
        counts = np.diff(self._inputs.score_offsets)
        rows = np.repeat(np.arange(counts.size, dtype=np.int32), counts)
        return self._at(rows, self._inputs.score_ids)

    def _at(self, rows: IntArray, ids: IntArray) -> FloatArray:
        if rows.size == 0:
            return np.zeros(0, np.float32)
        device = self._logits.device
        at = tuple(torch.from_numpy(index.astype(np.int64)).to(device) for index in (rows, ids))
        values: FloatArray = self._logits[at].cpu().numpy() - self._normaliser[rows]
        return values

    def _top(self) -> tuple[IntArray, FloatArray]:
        ids, values = [np.zeros(0, np.int32)], [np.zeros(0, np.float32)]
        for row in np.flatnonzero(self._inputs.top_n > 0):
            logits = self._logits[row]
            count = int(self._inputs.top_n[row])
            lowest = logits.topk(count).values[-1]
            candidates = torch.nonzero(logits >= lowest)[:, 0]
            found = logits[candidates].cpu().numpy()
            numbers = candidates.cpu().numpy()
            best = np.lexsort((numbers, -found))[:count]
            ids.append(numbers[best].astype(np.int32))
            values.append(found[best] - self._normaliser[row])
        return np.concatenate(ids), np.concatenate(values)
