"""From logits to tokens: what the runner calls, in the order of a step.

    draws = draw(logits, samples, slots, adjustments)
    note_tokens(draws.token_ids, samples.slots, last_tokens, counts)
    wanted = log_probs(draws, samples.logit_index, request)

Rules and results are those of `StepwiseBackend.sample`, with every array on the device: the same
tokens for the same logits and seeds, bit for bit, and log-probs up to rounding. Nothing here
synchronises; allocations and grids follow from shapes alone, so each call can be captured in a CUDA
graph and replayed over the same addresses. What a call is *given* may differ by host knowledge: no
`Adjustments`, `is_greedy` or no `log_probs` leave launches out that would find nothing to do.

What lives on the device by slot: the plan's `opened_float`, `opened_int` and `opened_seed` records
as tables, and for slots with penalties one *lane* of `vocabulary` int32 output counts. When such a
slot is opened the runner gives it a lane, zeroes it and adds the known output ids; `note_tokens`
keeps it up with the draws; the lane is free again when the slot is closed. Sparse lists (bias,
suppressed ids) come with each step that samples for such slots.

Padding rows of a captured step name a slot whose temperature is 0 and lane -1; their token is that
of the logit position they name.

Files, in the order in which a row passes them:

    rows         maxima of groups of ids, by which later passes leave tiles out
    penalties    adjusted copies of rows, and output counts; `mask` is the grammar's part
    draw         best id (all of a greedy draw), noise, winner; `noise` says why it is exact
    cuts         top-k and top-p: `levels` brackets a cut, `threshold` finds it
    logprobs     normalisers, given ids, best ids
    stepwise     all of it behind `StepwiseBackend.sample`

Passes over a row of V logits, of V * 4 bytes each, of which the first must be. Figures in brackets:
152k ids at temperature 1, from a peaked to a flat row.

    greedy                 1
    temperature, min-p     1, and tiles with logits that noise can lift to the best (1.6 to 2)
    top-k                  1, and tiles with one of the k best three times (k = 50: 2.8)
    top-p                  2, and tiles at or above the cut up to three times (0.95: 2.1 to 5)
    adjusted               2 more (read, write); output counts 1 more, a mask 1/32, bias 1 more
    log-probs              1 more
"""

from trunkline.kernels.triton.draw import Draws, draw
from trunkline.kernels.triton.logprobs import LogProbRequest, LogProbs, log_probs
from trunkline.kernels.triton.penalties import (
    Adjustments,
    Counts,
    Entries,
    Masks,
    Samples,
    SlotTables,
    note_tokens,
)

__all__ = [
    "Adjustments",
    "Counts",
    "Draws",
    "Entries",
    "LogProbRequest",
    "LogProbs",
    "Masks",
    "Samples",
    "SlotTables",
    "draw",
    "log_probs",
    "note_tokens",
]
