"""Progress bars that leave no thread behind."""

from __future__ import annotations

from tqdm import tqdm


class ProgressBar(tqdm):  # type: ignore[type-arg]
    """tqdm without its monitor thread, which would outlive the bar."""

    monitor_interval = 0
