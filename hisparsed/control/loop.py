"""The control loop: observe, decide, apply, confirm from the next report, journal.

Clocks, sleep and engine are passed in. The policy makes all decisions. A failed report or command
is counted and the loop continues; a dead engine ends it, and others report it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from hisparsed.control.events import Broadcast, EventRecorder
from hisparsed.control.holds import Holds
from hisparsed.control.journal.journal import Journal
from hisparsed.control.journal.records import Applied, TickRecord
from hisparsed.control.live_policy import PolicySource
from hisparsed.control.metrics.collector import ControlMetrics
from hisparsed.control.observe import (
    bounded_levers,
    confirm,
    cycle_sentence,
    notable_levers,
    observe,
)
from hisparsed.control.operator import record_advance, record_dropped
from hisparsed.control.policy_in_force import PolicyJournal
from hisparsed.control.state_files import TargetFile, Targets, with_kept_targets
from hisparsed.control.status.current import CurrentStatus, TickOutcome
from hisparsed.control.watch import LedgerGuard
from hisparsed.engine.messages import ApplyResult
from hisparsed.engine.port import EngineGone, EnginePort, ServingCounters
from hisparsed.logs.event_ids import LEVERS_MOVED
from hisparsed.policy.bounds import start_blocks, start_command
from hisparsed.policy.decide import decide
from hisparsed.policy.decisions import Decision, EngineCommand
from hisparsed.policy.events import EventKind
from hisparsed.policy.guards import stalled
from hisparsed.policy.memory import Memory
from hisparsed.policy.signals import AdmissionRules, EngineReport, Lever, PoolGeometry, Snapshot

log = logging.getLogger("hisparsed.control")

_SAY_LATE_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """The parts that every control loop of one daemon uses; made once, they outlive engines.

    ``clock`` is monotonic seconds, ``wall_clock`` Unix seconds.
    """

    source: PolicySource
    holds: Holds
    journal: Journal
    broadcast: Broadcast
    recorder: EventRecorder
    status: CurrentStatus
    metrics: ControlMetrics
    clock: Callable[[], float]
    wall_clock: Callable[[], float]
    targets: TargetFile | None = None
    """Keeps the targets in force over a restart; ``None`` to keep none."""


class ControlLoop:
    """The loop of one engine. ``clock`` is monotonic seconds, ``wall_clock`` Unix seconds.

    ``set_admission`` applies the limits that the API enforces; it is called with each admission
    that the engine accepted. ``refused`` counts calls that these limits refused. Call ``start``
    once, then ``run``.
    """

    def __init__(
        self,
        engine: EnginePort,
        plane: ControlPlane,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        set_admission: Callable[[AdmissionRules], None],
        refused: Callable[[], int] | None = None,
        live_levers: frozenset[Lever] = frozenset(Lever),
    ) -> None:
        self._engine = engine
        self._source = plane.source
        self._holds = plane.holds
        self._journal = plane.journal
        self._recorder = plane.recorder
        self._metrics = plane.metrics
        self._status = plane.status
        self._counters = plane.status.counters
        self._targets = plane.targets
        self._clock = plane.clock
        self._wall_clock = plane.wall_clock
        self._sleep = sleep
        self._set_admission = set_admission
        self._refused = refused
        self._live_levers = live_levers
        self._guard = LedgerGuard(engine, plane.holds, plane.recorder)
        self._policy_journal = PolicyJournal(
            plane.source,
            plane.holds,
            plane.journal,
            pending=plane.status.pending_restart,
            wall_clock=plane.wall_clock,
        )
        self._memory = Memory()
        self._report: EngineReport | None = None
        self._reported_at_s = 0.0
        self._report_failing = False
        self._tick_failing = False
        self._admission: AdmissionRules | None = None
        self._unconfirmed: tuple[int, Applied] | None = None
        self._previous: Decision | None = None
        self._snapshot: Snapshot | None = None
        self._tick = 0

    async def start(self) -> None:
        """Take the first report, check the policy for the node, apply the start values.

        Raises ``UserError`` when the policy is impossible on this node, and whatever the
        engine raises: a node whose engine refuses its start must not serve.
        """
        report = await self._engine.report()
        geometry = report.geometry
        record_dropped(self._recorder, self._source.bind(geometry))
        record_advance(self._recorder, self._source.advance())
        policy = self._holds.over(self._source.in_force.policy)
        self._admission = replace(report.admission, retry_after_s=policy.admission.retry_after)
        command = start_command(policy, geometry)
        empty = command.offload_target_blocks is None and report.offload.target_blocks == 0
        if empty and geometry.lends:
            # In every mode: a node that starts with an empty offload pool would never have a hit.
            blocks = start_blocks(policy, geometry)
            command = replace(command, offload_target_blocks=blocks)
        kept = None
        if self._targets is not None:
            kept = self._targets.load(self._source.active.content_hash, geometry)
        if kept is not None:
            command = with_kept_targets(command, kept, policy, geometry)
        if command:
            result = await self._engine.apply(command)
            self._accept(command)
            await self._keep(result, geometry)
            words = "Restored from the last run:" if kept else "Started with"
            sentence = (
                f"{words} {result.offload_target_blocks} of {geometry.budget_blocks} host "
                f"blocks for the offload pool, a multiplier of {result.multiplier:g}x and the "
                f"{result.admission_order} order."
            )
        else:
            sentence = "Started; every lever stays at the engine's value."
        self._recorder.event(EventKind.STARTED, sentence)

    async def run(self) -> None:
        """Tick until cancelled. Raises ``EngineGone`` when the engine has died, nothing else."""
        due_s = self._clock()
        said_late_s = -math.inf
        while True:
            await self._safe_tick()
            period_s = self._source.in_force.policy.tick
            now_s, due_s = self._clock(), due_s + period_s
            left_out = math.ceil((now_s - due_s) / period_s) if now_s > due_s else 0
            if left_out:
                # Ticks that are due are skipped, so that a slow engine is not asked more often.
                due_s += left_out * period_s
                self._counters.late_ticks += left_out
                if now_s - said_late_s >= _SAY_LATE_EVERY_S:
                    said_late_s = now_s
                    log.warning(
                        "Tick %d took more than %gs; %d skipped so far.",
                        self._tick,
                        period_s,
                        self._counters.late_ticks,
                    )
            await self._sleep(due_s - now_s)

    async def _safe_tick(self) -> None:
        """An error in a decision must not stop the requests: the levers stay, and the loop
        continues."""
        try:
            await self.tick()
        except EngineGone:
            raise
        except Exception as error:
            self._counters.failed_ticks += 1
            if not self._tick_failing:
                log.exception("Tick %d failed.", self._tick)
                self._recorder.event(
                    EventKind.TICK_FAILED,
                    f"Tick {self._tick} failed ({type(error).__name__}: {error}); the node "
                    f"continues and tries again. This is a bug in the daemon: please report it.",
                )
            self._tick_failing = True
        else:
            self._tick_failing = False

    async def tick(self) -> None:
        """One cycle. Raises ``EngineGone``."""
        began_s = self._clock()
        fresh = await self._take_report()
        report, last_admission = self._report, self._admission
        if report is None or last_admission is None:
            return
        if fresh:
            await self._guard.look(report)
        self._tick += 1
        record_advance(self._recorder, self._source.advance(self._snapshot))
        self._policy_journal.look()
        active = self._source.active
        policy = self._holds.over(self._source.in_force.policy)
        now_s = self._clock()
        snapshot = observe(
            report,
            self._serving(),
            at_s=now_s,
            report_age_s=now_s - self._reported_at_s,
            tick=self._tick,
            policy_generation=active.generation,
            last_admission=last_admission,
            live_levers=self._live_levers,
            frozen_levers=self._holds.frozen,
        )
        self._snapshot = snapshot
        confirmed = None
        if fresh and self._unconfirmed is not None:
            confirmed = confirm(*self._unconfirmed, report)
            self._unconfirmed = None
        decision, self._memory = decide(policy, snapshot, self._memory)
        applied = await self._apply(decision.commands)
        if applied is not None and applied.result is not None:
            await self._keep(applied.result, snapshot.geometry)
        elif self._targets is not None and self._targets.owed:
            await asyncio.to_thread(self._targets.retry)
        notable = notable_levers(decision, self._previous)
        record = TickRecord(
            sequence=self._journal.next_sequence(),
            at_unix_s=self._wall_clock(),
            policy_hash=active.content_hash,
            snapshot=snapshot,
            decision=decision,
            applied=applied,
            confirmed=confirmed,
            notable=notable,
            sentence=cycle_sentence(decision, notable, applied, confirmed),
        )
        self._previous = decision
        self._journal.record(record)
        tick_s = self._clock() - began_s
        self._metrics.count_tick(record, tick_s)
        # Without a new report the engine's state is unknown: it may be in one long step.
        still = stalled(policy, snapshot, self._memory) if fresh else None
        self._status.show(TickOutcome(record, policy, self._reported_at_s, tick_s, still))
        if record.sentence is not None:
            moved = applied is not None
            level = logging.INFO if moved else logging.DEBUG
            log.log(level, "%s", record.sentence, extra={"event_id": LEVERS_MOVED})

    def _serving(self) -> ServingCounters:
        counters = self._engine.serving()
        return counters if self._refused is None else replace(counters, refused=self._refused())

    async def _take_report(self) -> bool:
        """Whether there is a new report; the last one stays in use where there is none."""
        try:
            self._report = await self._engine.report()
        except EngineGone:
            raise
        except Exception as error:
            self._counters.failed_reports += 1
            if not self._report_failing:
                self._recorder.event(
                    EventKind.REPORT_FAILED, f"The engine did not report: {_words(error)}."
                )
            self._report_failing = True
            return False
        self._reported_at_s = self._clock()
        if self._report_failing:
            self._recorder.event(EventKind.REPORT_BACK, "The engine reports again.")
        self._report_failing = False
        return True

    async def _apply(self, command: EngineCommand) -> Applied | None:
        if not command:
            return None
        began_s = self._clock()
        try:
            result = await self._engine.apply(command)
        except EngineGone:
            raise
        except Exception as error:
            self._counters.failed_applies += 1
            log.warning("The engine refused a command: %s", _words(error))
            return Applied(command, None, _words(error))
        self._metrics.count_apply(self._clock() - began_s)
        self._accept(command)
        applied = Applied(command, result, None, bounded_levers(command, result))
        self._unconfirmed = (self._tick, applied)
        return applied

    async def _keep(self, result: ApplyResult, geometry: PoolGeometry) -> None:
        """Write down what is in force, for the next start; in a thread, as disks are slow."""
        if self._targets is None or self._admission is None:
            return
        targets = Targets(result.offload_target_blocks, result.multiplier, self._admission)
        policy_hash = self._source.active.content_hash
        await asyncio.to_thread(self._targets.save, policy_hash, geometry, targets)

    def _accept(self, command: EngineCommand) -> None:
        if command.admission is not None:
            self._admission = command.admission
            self._set_admission(command.admission)


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
