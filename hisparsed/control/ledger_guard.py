"""What the daemon does when the engine finds its host ledger broken: freeze, tell, wait.

The engine has stopped all moves by itself and serves on. Here every lever is frozen, so that
decisions say so, and an event tells people. When somebody thaws, the engine checks everything
once more; only a sound ledger moves again.
"""

from __future__ import annotations

from hisparsed.control.announce import Announcer
from hisparsed.control.engine_port import EngineGone, EnginePort
from hisparsed.control.overrides import Overrides
from hisparsed.control.records import EventKind
from hisparsed.engine.messages import EngineCommand, EngineReport
from hisparsed.policy.reasons import Lever

_ALL = frozenset(Lever)


class LedgerGuard:
    """One engine life. Call ``look`` with each new report."""

    def __init__(self, engine: EnginePort, overrides: Overrides, announcer: Announcer) -> None:
        self._engine = engine
        self._overrides = overrides
        self._announcer = announcer
        self._told = 0

    async def look(self, report: EngineReport) -> None:
        """Raises ``EngineGone``."""
        if not report.violations:
            return
        if report.violations_total > self._told:
            self._told = report.violations_total
            self._overrides.freeze(_ALL)
            broken = "; ".join(f"{one.rule}: {one.sentence}" for one in report.violations)
            self._announcer.event(
                EventKind.LEDGER_VIOLATION,
                f"The host ledger is not sound ({broken}). Requests are served on; every lever is "
                "frozen until somebody thaws it and a check of the whole ledger finds nothing.",
            )
        elif self._overrides.frozen != _ALL:
            await self._clear()

    async def _clear(self) -> None:
        try:
            await self._engine.apply(EngineCommand(clear_violations=True))
        except EngineGone:
            raise
        except Exception as error:
            self._overrides.freeze(_ALL)
            self._announcer.event(
                EventKind.LEDGER_VIOLATION, f"Every lever is frozen again: {error}."
            )
        else:
            self._announcer.event(
                EventKind.LEDGER_SOUND,
                "A check of the whole host ledger found nothing wrong; thawed levers move again.",
            )
