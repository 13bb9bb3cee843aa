"""Launches of the sampling family."""

import itertools
from collections.abc import Iterator
from functools import partial

import torch
from tests.kernels.triton.cross_compile import Launch

from trunkline.kernels.triton.launch import DeviceTraits
from trunkline.kernels.triton.sample import (
    Adjustments,
    Counts,
    Entries,
    LogProbRequest,
    Masks,
    Samples,
    SlotTables,
    draw,
    log_probs,
    note_tokens,
)

SAMPLES, SLOTS, POSITIONS = 48, 64, 32


def _integers(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32)


def _entries(with_values: bool) -> Entries:
    values = torch.empty(100) if with_values else None
    return Entries(rows=_integers(100), ids=_integers(100), values=values)


def _adjustments(vocabulary: int, with_lists: bool) -> Adjustments:
    return Adjustments(
        is_adjusted=_integers(SAMPLES),
        counts=Counts(lanes=_integers(SAMPLES), table=_integers(4, vocabulary)),
        masks=Masks(rows=_integers(SAMPLES), words=_integers(SAMPLES, -(-vocabulary // 32))),
        bias=_entries(True) if with_lists else None,
        suppressed=_entries(False) if with_lists else None,
    )


def _step(vocabulary: int, adjusts: bool, max_top_n: int) -> None:
    samples = Samples(
        logit_index=_integers(SAMPLES), slots=_integers(SAMPLES), positions=_integers(SAMPLES)
    )
    slots = SlotTables(
        floats=torch.empty((SLOTS, 8)),
        ints=_integers(SLOTS, 8),
        seeds=torch.empty(SLOTS, dtype=torch.int64),
    )
    adjustments = _adjustments(vocabulary, max_top_n > 0) if adjusts else None
    draws = draw(torch.empty((POSITIONS, vocabulary)), samples, slots, adjustments)
    counts = None if adjustments is None else adjustments.counts
    note_tokens(draws.token_ids, samples.slots, _integers(SLOTS), counts)
    request = LogProbRequest(
        is_wanted=_integers(POSITIONS),
        top_n=_integers(POSITIONS) if max_top_n else None,
        max_top_n=max_top_n,
        score_rows=_integers(100),
        score_ids=_integers(100),
        processed_sample=_integers(POSITIONS) if adjusts else None,
    )
    log_probs(draws, samples.logit_index, request)


def launches(traits: DeviceTraits, quick: bool) -> Iterator[Launch]:
    """Vocabularies from 32k to 152k, also one that is no multiple of 16."""
    vocabularies = (151936,) if quick else (32000, 49153, 151936)
    widths = (20,) if quick else (0, 20, 128)
    for vocabulary, adjusts, width in itertools.product(vocabularies, (False, True), widths):
        name = f"vocabulary={vocabulary} adjusts={adjusts} top_n={width}"
        yield Launch(name, partial(_step, vocabulary, adjusts, width))
