"""Launches of the soft cap of logits."""

from collections.abc import Iterator
from functools import partial

import torch
from tests.kernels.triton.cross_compile import Launch

from trunkline.kernels.triton.launch import DeviceTraits
from trunkline.kernels.triton.soft_cap import cap_softly


def _cap(rows: int, width: int) -> None:
    cap_softly(torch.empty((rows, width)), 30.0)


def launches(traits: DeviceTraits, quick: bool) -> Iterator[Launch]:
    """Vocabularies of Gemma models, and one whose rows are not aligned."""
    for width in (256000,) if quick else (256000, 256128, 199):
        yield Launch(f"soft cap {width}", partial(_cap, 3, width))
