"""The control side of a node around a canary, with a clock that moves when told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hisparsed.canary.question import CanaryEngine
from hisparsed.canary.watch import CanaryWatch
from hisparsed.control.announce import Announcer
from hisparsed.control.board import TickOutcome
from hisparsed.control.broadcast import Broadcast
from hisparsed.control.engine_port import ServingCounters
from hisparsed.control.journal import Journal
from hisparsed.control.journal_writer import JournalWriter
from hisparsed.control.observe import observe
from hisparsed.control.overrides import Overrides
from hisparsed.control.records import TickRecord
from hisparsed.engine.messages import EngineReport
from hisparsed.policy.decide import decide
from hisparsed.policy.memory import Memory
from hisparsed.policy.reasons import Lever
from hisparsed.policy.schema import Policy
from hisparsed.policy.signals import Admission, AdmissionOrder


class Side:
    """Overrides, journal and events of a node, its canary, and a clock that moves when told."""

    def __init__(self, folder: Path, engine: CanaryEngine) -> None:
        self.now_s = 1_000.0
        self.folder = folder
        self.overrides = Overrides()
        writer = JournalWriter(
            folder, run="run", clock=self.clock, stamp=lambda: "20260101T000000", log=print
        )
        self.journal = Journal(writer, run="run")
        announcer = Announcer(self.journal, Broadcast(), wall_clock=self.wall_clock)
        self.canary = CanaryWatch(
            engine,
            self.overrides,
            announcer,
            self.journal,
            folder,
            clock=self.clock,
            wall_clock=self.wall_clock,
        )

    def clock(self) -> float:
        return self.now_s

    def wall_clock(self) -> float:
        return 1_700_000_000.0 + self.now_s

    def events(self) -> list[str]:
        """Oldest first."""
        return [one.kind.value for one in reversed(self.journal.recent_events(50))]

    def last_words(self) -> str:
        return self.journal.recent_events(1)[0].sentence

    async def tick(self, report: EngineReport, **canary: Any) -> None:
        """One tick of a node with this report, and the round that it asks for, to its end."""
        self.canary.watch(self.outcome(report, **canary))
        if self.canary._round is not None:
            await self.canary._round

    def outcome(self, report: EngineReport, **canary: Any) -> TickOutcome:
        policy = Policy.model_validate({"version": 1, "canary": canary})
        order = AdmissionOrder(report.admission_order)
        snapshot = observe(
            report,
            ServingCounters(),
            at_s=self.now_s,
            report_age_s=0.0,
            tick=1,
            policy_generation=1,
            last_admission=Admission(order, 30.0, 8, None, 10.0),
            live_levers=frozenset(Lever),
            frozen_levers=self.overrides.frozen,
        )
        decision, _ = decide(policy, snapshot, Memory())
        record = TickRecord(
            self.journal.next_sequence(),
            self.wall_clock(),
            "hash",
            snapshot,
            decision,
            None,
            None,
            frozenset(Lever),
            None,
        )
        self.journal.record(record)
        return TickOutcome(record, report, ServingCounters(), policy, self.now_s, 0.0)
