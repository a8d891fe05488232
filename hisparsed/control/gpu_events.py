"""Tells when a GPU is lost or back, and when its clocks are held down for long or no longer.

Pure: readings and times in, events out. Not here: a GPU at its power cap, which is how a busy one
runs; the status and the metrics show that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hisparsed.control.records import EventKind
from hisparsed.control.status_gpus import GpuCard, GpusStatus

HELD_S = 10.0
"""Clocks that are held down for a moment cost nothing."""
FREE_S = 60.0
"""At full speed for so long before it is said: heat comes and goes."""
_NORMAL = frozenset({"power-cap"})


@dataclass
class _Known:
    lost: bool = False
    told: frozenset[str] = frozenset()
    """Reasons that were told of; empty at full speed."""
    changed_s: float | None = None
    """Since when it is held down without being told, or free after it was."""


class GpuEvents:
    """Call ``news`` about once a second with what the status shows."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def news(self, gpus: GpusStatus | None, now_s: float) -> Iterator[tuple[EventKind, str]]:
        """Events since the last call, each with its sentence; ``now_s`` is monotonic."""
        for card in gpus.cards if gpus is not None else ():
            known = self._known.setdefault(card.index, _Known())
            yield from _lost_or_back(card, known)
            if not card.lost and card.slowed_by is not None:
                yield from _throttled(card, frozenset(card.slowed_by) - _NORMAL, known, now_s)


def _lost_or_back(card: GpuCard, known: _Known) -> Iterator[tuple[EventKind, str]]:
    if card.lost and not known.lost:
        yield (
            EventKind.GPU_LOST,
            f"GPU {card.index} ({card.name}, {card.uuid}) is lost: it fell off the bus or needs a "
            "reset. The engine cannot run without it; look for Xid in the kernel's log, then reset "
            "it or restart the machine.",
        )
    elif known.lost and not card.lost:
        yield EventKind.GPU_BACK, f"GPU {card.index} ({card.name}) answers again."
    known.lost = card.lost


def _throttled(
    card: GpuCard, reasons: frozenset[str], known: _Known, now_s: float
) -> Iterator[tuple[EventKind, str]]:
    if bool(reasons) == bool(known.told):
        known.changed_s = None
        return
    if known.changed_s is None:
        known.changed_s = now_s
    if now_s - known.changed_s < (HELD_S if reasons else FREE_S):
        return
    known.told, known.changed_s = reasons, None
    if reasons:
        yield (
            EventKind.GPU_THROTTLED,
            f"GPU {card.index} ({card.name}) has been slower than it can be for {HELD_S:g}s: "
            f"{', '.join(sorted(reasons))}. All ranks wait for the slowest; look at cooling and "
            "power.",
        )
    else:
        yield EventKind.GPU_FULL_SPEED, f"GPU {card.index} ({card.name}) is at full speed again."
