"""HiSparse's writes to the host pool that wait for the next step: rows of draft layers, since 0.31.

They are mirrored when the drafter has run. Before, nothing waited.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def pending_writes(hisparse_worker: Any) -> Callable[[], None]:
    """Puts what waits on HiSparse's stream, as the next step would first; may be called often."""
    enqueue: Callable[[], None] = getattr(hisparse_worker, "_finish_previous_step", _nothing_waits)
    return enqueue


def _nothing_waits() -> None:
    return None
