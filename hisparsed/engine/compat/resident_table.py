"""vLLM 0.31 keeps a resident table of the batch, later versions one of all state rows."""

from __future__ import annotations

from typing import Any


def resident_by_state(cache_handle: Any) -> bool:
    """Whether rows of the handle's resident block table are state rows, not batch rows."""
    return getattr(cache_handle, "residency", None) is not None
