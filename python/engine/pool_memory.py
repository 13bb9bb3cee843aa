"""Taking the KV pool's memory in the background, before requests need it.

What is taken is never more than the pool that `resources.py` allowed; how, is the backend's affair.
Most of it is taken while nothing runs: even a thread that wants only idle time holds up a step
where the host of a virtual machine must find the memory first.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Final

from trunkline.engine import resources
from trunkline.kernels import Population

# Between two portions it is asked whether to go on: who exits waits for one at most.
PORTION_BYTES: Final = 4 << 20
# While steps run, no more is taken than this beyond what they have written.
BYTES_AHEAD: Final = 256 << 20
# So long after a step there are none to be held up.
IDLE_S: Final = 0.3
LOOK_S: Final = 0.1


def take_ahead(population: Population | None, logger: logging.Logger) -> threading.Thread | None:
    """Begin to take a pool's memory.

    Returns:
        The thread that waits for it: it ends when all is taken, the pool is gone, the system
        refuses, others need the memory, or the interpreter exits. None: there is nothing to take.
    """
    if population is None:
        return None
    # No daemon: those must not return from native code while the interpreter exits.
    thread = threading.Thread(target=_take, args=(population, logger), name="kv-pool")
    thread.start()
    return thread


def _take(population: Population, logger: logging.Logger) -> None:
    try:
        while threading.main_thread().is_alive():
            if population.bytes_ahead >= BYTES_AHEAD and population.idle_s < IDLE_S:
                time.sleep(LOOK_S)
                continue
            free = resources.free_host_bytes()
            if free < resources.HOST_RESERVE_BYTES:
                reason = f"only {free / resources.GIB:.2f} GiB are free"
                break
            if not population.advance(PORTION_BYTES):
                return
        else:
            return
    except OSError as error:
        reason = str(error)
    logger.warning(
        "The memory of the KV pool (%.2f GiB) is not taken ahead any further, but as it is used: "
        "%s",
        population.num_bytes / resources.GIB,
        reason,
    )
