"""Fields that every typed body has, whatever it asks for."""

from __future__ import annotations

from typing import Any

import msgspec


class SchedulingFields(msgspec.Struct, kw_only=True):
    """Which model and engine, under which id, how urgent, and what may share its cache."""

    model: Any = None
    rid: Any = None
    priority: Any = None
    extra_key: str | None = None
    cache_salt: str | None = None
    routed_dp_rank: Any = None
    data_parallel_rank: Any = None
