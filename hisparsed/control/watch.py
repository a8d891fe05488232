"""Watches that report trouble as events: a broken host ledger, GPUs, files that cannot be written.

``LedgerGuard`` freezes all levers until a check of the whole ledger is clean. ``GpuEvents`` reports
a GPU that is lost or slowed for long. ``StateWatch`` reports state files that cannot be written.
None of them repairs anything.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from hisparsed.control.events import EventRecorder
from hisparsed.control.holds import Holds
from hisparsed.control.journal.journal import Journal
from hisparsed.control.status.current import TickOutcome
from hisparsed.engine.cuda.nvml import GpuCard, GpusStatus
from hisparsed.engine.port import EngineGone, EnginePort
from hisparsed.policy.decisions import EngineCommand
from hisparsed.policy.events import EventKind
from hisparsed.policy.signals import EngineReport, Lever

_ALL = frozenset(Lever)


class LedgerGuard:
    """For one engine. Call ``look`` with each new report."""

    def __init__(self, engine: EnginePort, holds: Holds, recorder: EventRecorder) -> None:
        self._engine = engine
        self._holds = holds
        self._recorder = recorder
        self._reported = 0

    async def look(self, report: EngineReport) -> None:
        """Raises ``EngineGone``."""
        if not report.ledger.violations:
            return
        if report.ledger.violations_total > self._reported:
            self._reported = report.ledger.violations_total
            self._holds.freeze(_ALL)
            broken = "; ".join(f"{one.rule}: {one.sentence}" for one in report.ledger.violations)
            self._recorder.event(
                EventKind.LEDGER_VIOLATION,
                f"The host ledger is inconsistent ({broken}). Requests are still served; every "
                f"lever is frozen until an operator thaws it and a check of the whole ledger finds "
                f"nothing.",
            )
        elif self._holds.frozen != _ALL:
            await self._clear()

    async def _clear(self) -> None:
        try:
            await self._engine.apply(EngineCommand(clear_violations=True))
        except EngineGone:
            raise
        except Exception as error:
            self._holds.freeze(_ALL)
            self._recorder.event(
                EventKind.LEDGER_VIOLATION, f"Every lever is frozen again: {error}."
            )
        else:
            self._recorder.event(
                EventKind.LEDGER_SOUND,
                "A check of the whole host ledger found nothing wrong; thawed levers move again.",
            )


HELD_S = 10.0
"""Clocks that are lowered for a moment cost nothing."""
FREE_S = 60.0
"""At full speed for this long before it is reported, because heat varies."""
_NORMAL = frozenset({"power-cap"})


@dataclass
class _Known:
    lost: bool = False
    reported: frozenset[str] = frozenset()
    """Reasons that were reported; empty at full speed."""
    changed_s: float | None = None
    """Since when it is slow and not reported, or fast and not reported."""


class GpuEvents:
    """Call ``changes`` about once per second with what the status shows."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def changes(self, gpus: GpusStatus | None, now_s: float) -> Iterator[tuple[EventKind, str]]:
        """Events since the last call, each with its sentence; ``now_s`` is monotonic."""
        for card in gpus.cards if gpus is not None else ():
            known = self._known.setdefault(card.index, _Known())
            yield from _lost_or_back(card, known)
            if not card.lost and card.slowed_by is not None:
                yield from _throttled(card, frozenset(card.slowed_by) - _NORMAL, known, now_s)


async def report_gpus(
    status: Callable[[], GpusStatus | None], recorder: EventRecorder, *, every_s: float = 1.0
) -> None:
    """Until cancelled, also while no engine runs, because a lost GPU ends the engine."""
    events = GpuEvents()
    while True:
        for kind, sentence in events.changes(status(), time.monotonic()):
            recorder.event(kind, sentence)
        await asyncio.sleep(every_s)


def _lost_or_back(card: GpuCard, known: _Known) -> Iterator[tuple[EventKind, str]]:
    if card.lost and not known.lost:
        yield (
            EventKind.GPU_LOST,
            f"GPU {card.index} ({card.name}, {card.uuid}) is lost: it fell off the bus or needs a "
            "reset. The engine cannot run without it; look for Xid in the kernel log, then reset "
            "it or restart the machine.",
        )
    elif known.lost and not card.lost:
        yield EventKind.GPU_BACK, f"GPU {card.index} ({card.name}) answers again."
    known.lost = card.lost


def _throttled(
    card: GpuCard, reasons: frozenset[str], known: _Known, now_s: float
) -> Iterator[tuple[EventKind, str]]:
    if bool(reasons) == bool(known.reported):
        known.changed_s = None
        return
    if known.changed_s is None:
        known.changed_s = now_s
    if now_s - known.changed_s < (HELD_S if reasons else FREE_S):
        return
    known.reported, known.changed_s = reasons, None
    if reasons:
        yield (
            EventKind.GPU_THROTTLED,
            f"GPU {card.index} ({card.name}) has been slower than possible for {HELD_S:g}s: "
            f"{', '.join(sorted(reasons))}. All ranks wait for the slowest; check cooling and "
            f"power.",
        )
    else:
        yield EventKind.GPU_FULL_SPEED, f"GPU {card.index} ({card.name}) is at full speed again."


class StateWatch:
    """``files`` returns for each small file why it cannot be written; ``None`` when it can.

    Call ``watch`` after each tick.
    """

    def __init__(
        self,
        journal: Journal,
        recorder: EventRecorder,
        files: Mapping[str, Callable[[], str | None]],
    ) -> None:
        self._journal = journal
        self._recorder = recorder
        self._files = files
        self._reported: set[str] = set()
        self._set_aside = self._lost = 0

    def not_kept(self) -> list[str]:
        """Why files other than the journal cannot be written; empty when all can."""
        return [error for look in self._files.values() if (error := look()) is not None]

    def watch(self, _outcome: TickOutcome) -> None:
        health = self._journal.health
        if health.set_aside > self._set_aside:
            self._set_aside = health.set_aside
            self._recorder.event(
                EventKind.JOURNAL_SET_ASIDE,
                f"The journal {self._journal.path} was damaged or of another version; it was "
                f"renamed and a new one was created. Earlier decisions are only in the renamed "
                f"file.",
            )
        if health.lost > self._lost:
            self._lost = health.lost
            self._recorder.event(
                EventKind.JOURNAL_LOST,
                f"The journal {self._journal.path} was removed or replaced while in use; a new one "
                f"was created. Earlier decisions are only in the removed file.",
            )
        error = health.error
        self._report(
            "the journal",
            None if error is None else f"{self._journal.path} cannot be written: {error}",
            "decisions are kept in memory, and the oldest are lost when it is full",
        )
        for name, look in self._files.items():
            self._report(name, look(), "its content is in effect, but a restart would lose it")

    def _report(self, name: str, error: str | None, follows: str) -> None:
        if error is not None and name not in self._reported:
            self._reported.add(name)
            self._recorder.event(
                EventKind.STATE_NOT_KEPT,
                f"{error}. Requests are still served; {follows}. It is tried again.",
            )
        elif error is None and name in self._reported:
            self._reported.remove(name)
            self._recorder.event(EventKind.STATE_KEPT, f"Written again: {name}.")
