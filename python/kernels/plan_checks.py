"""What a plan must keep to, whichever backend executes it: sizes of pool, tables and slots."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trunkline.kernels.interface import IntArray, ProgramSizes
from trunkline.plan import ADAPTER, Plan


def check_plan(plan: Plan, sizes: ProgramSizes) -> None:
    """Refuse a plan that contradicts a program's sizes or asks for what no program does.

    Raises:
        ValueError: it does; the message names the step and the limit.
    """
    slots = sizes.num_slots
    pages = sizes.kv.num_pages
    table_pages = -(-sizes.max_context_len // sizes.kv.page_size)
    kv_lens = plan.row_computed_len + plan.row_query_len
    moved = plan.page_moves
    checks: tuple[tuple[bool | npt.NDArray[np.bool_], str], ...] = (
        (plan.opened_int[:, ADAPTER] == 0, "adapters are not supported"),
        (moved[:, [0, 2, 5]] == 0, "page moves between tiers are not supported"),
        (plan.page_writes[:, 0] == 0, "only cache group 0 exists"),
        (within(plan.opened_slots, 0, slots), f"opened slots must be below {slots}"),
        (within(plan.closed_slots, 0, slots), f"closed slots must be below {slots}"),
        (within(plan.row_slot, 0, slots), f"row slots must be below {slots}"),
        (within(plan.sample_slot, 0, slots), f"sample slots must be below {slots}"),
        (within(plan.page_writes[:, 1], 0, slots), f"slots must be below {slots}"),
        (within(plan.page_writes[:, 3], 1, pages), f"pages must be in 1..{pages}"),
        (within(moved[:, [1, 3]], 1, pages), f"moved pages must be in 1..{pages}"),
        (within(moved[:, 4], 0, sizes.kv.page_size + 1), "a move exceeds its page"),
        (
            within(plan.page_writes[:, 2], 0, table_pages),
            f"page index beyond max_context_len {sizes.max_context_len}",
        ),
        (
            within(kv_lens, 1, sizes.max_context_len + 1),
            f"a row exceeds max_context_len {sizes.max_context_len}",
        ),
    )
    for fine, message in checks:
        if not np.all(fine):
            raise ValueError(f"step {plan.step}: {message}")


def within(values: IntArray, low: int, high: int) -> npt.NDArray[np.bool_]:
    """Whether values lie in `low..high`, `high` excluded."""
    return (values >= low) & (values < high)
