"""What the daemon knows about itself now, gathered for the status document and the metrics.

The control loop writes it, everything else reads. Keeps the latest only; history is the
journal's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hisparsed.control.broadcast import Broadcast, Message
from hisparsed.control.engine_port import ServingCounters
from hisparsed.control.journal import Journal
from hisparsed.control.overrides import Overrides
from hisparsed.control.policy_source import PolicySource
from hisparsed.control.policy_views import schedule_statuses
from hisparsed.control.records import TickRecord, view_tick
from hisparsed.control.status import (
    BackgroundStatus,
    CanaryStatus,
    JournalStatus,
    Lifecycle,
    LoopStatus,
    NodeInfo,
    Observed,
    PolicyStatus,
    Status,
)
from hisparsed.control.status_build import lever_statuses, observed_status
from hisparsed.control.status_doctor import DoctorStatus
from hisparsed.control.status_engine import EngineLifeStatus, EngineState
from hisparsed.control.status_gpus import GpusStatus
from hisparsed.engine.messages import EngineReport
from hisparsed.policy.reasons import Lever
from hisparsed.policy.restart import PendingRestart
from hisparsed.policy.schema import Policy

_EVENTS_SHOWN = 5


@dataclass(frozen=True, slots=True)
class TickOutcome:
    """One finished tick. ``policy`` has the operator's overrides in it."""

    record: TickRecord
    report: EngineReport
    serving: ServingCounters
    policy: Policy
    reported_at_s: float
    tick_s: float
    stalled: str | None = None
    """That calls stand still though memory is free, with the figures; ``None`` when they move."""


class Board:
    """``clock`` is monotonic seconds, ``wall_clock`` Unix seconds."""

    def __init__(
        self,
        node: NodeInfo,
        source: PolicySource,
        overrides: Overrides,
        journal: Journal,
        broadcast: Broadcast,
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self.node = node
        self.lifecycle = Lifecycle.STARTING
        self.failed_reports = 0
        self.failed_applies = 0
        self.failed_ticks = 0
        self.late_ticks = 0
        self.node_pending: tuple[PendingRestart, ...] = ()
        """What the node's document says now, where it is not what runs."""
        self.watchers: list[Callable[[TickOutcome], None]] = []
        """Called with every finished tick."""
        self.canary: Callable[[], CanaryStatus] | None = None
        self.doctor: Callable[[], DoctorStatus] | None = None
        self.engine: Callable[[], EngineLifeStatus] | None = None
        self.gpus: Callable[[], GpusStatus | None] | None = None
        self.background: Callable[[], list[BackgroundStatus]] = list
        self.not_kept: Callable[[], list[str]] = list
        """Files of the state folder that cannot be written, and why."""
        self._source = source
        self._overrides = overrides
        self._journal = journal
        self._broadcast = broadcast
        self._clock = clock
        self._wall_clock = wall_clock
        self._last: TickOutcome | None = None
        self._said: tuple[str, float] | None = None

    def show(self, outcome: TickOutcome) -> None:
        """Take in a finished tick and tell the listeners.

        Raises what a watcher raised, when all have had the tick.
        """
        self._last = outcome
        record = outcome.record
        if record.sentence is not None:
            self._said = (record.sentence, record.at_unix_s)
        failed: Exception | None = None
        for watch in self.watchers:
            try:
                watch(outcome)
            except Exception as error:
                failed = failed or error
        self._send(record)
        if failed is not None:
            raise failed

    def _send(self, record: TickRecord) -> None:
        if not self._broadcast.listeners:
            return
        notable = [view.model_dump_json() for view in view_tick(record) if view.notable]
        if notable:
            self._broadcast.send(Message("decisions", f"[{','.join(notable)}]"))
        self._broadcast.send(Message("status", self.status().model_dump_json()))

    @property
    def report_age_s(self) -> float | None:
        """Seconds since the engine last reported; ``None`` before the first tick."""
        return None if self._last is None else self._clock() - self._last.reported_at_s

    def unready(self) -> str | None:
        """Why the node should get no requests; ``None`` when it should."""
        engine = self.engine() if self.engine is not None else None
        if self.lifecycle is not Lifecycle.SERVING:
            why = f": {engine.sentence}" if engine is not None else ""
            return f"the node is {self.lifecycle}{why}"
        if engine is not None and engine.state is not EngineState.SERVING:
            return engine.sentence
        age_s, limit_s = self.report_age_s, self._source.in_force.policy.stale_after
        if age_s is None:
            return "the engine has not reported yet"
        if age_s > limit_s:
            return f"the engine reported {age_s:.1f}s ago, over {limit_s:g}s"
        if self._last is not None and self._last.stalled is not None:
            return self._last.stalled
        canary = self._canary()
        if canary is not None and canary.not_ready:
            return f"the canary answered otherwise: {canary.sentence}"
        return None

    def _canary(self) -> CanaryStatus | None:
        return None if self.canary is None else self.canary()

    def pending_restart(self) -> list[PendingRestart]:
        """Values of the policy and of the node's document that only a restart puts in force."""
        return [*self._source.pending_restart(), *self.node_pending]

    def status(self) -> Status:
        """The document of this moment; the report's age is of now, not of the last tick."""
        last, said, health = self._last, self._said, self._journal.health
        active = self._source.active
        frozen = self._overrides.frozen
        return Status(
            at_unix_s=self._wall_clock(),
            node=self.node,
            lifecycle=self.lifecycle,
            observed=self._observed(last) if last is not None else None,
            levers=lever_statuses(last.policy, last.record.decision, frozen) if last else [],
            policy=PolicyStatus(
                path=str(active.path),
                generation=active.generation,
                content_hash=active.content_hash,
                mode=self._source.in_force.policy.mode,
                overridden=dict(self._overrides.modes),
                frozen=[lever for lever in Lever if lever in frozen],
                reload_failures=self._source.reload_failures,
                last_error=self._source.last_error,
                overrides=list(self._source.overrides),
                schedules=schedule_statuses(self._source),
                pending_restart=self.pending_restart(),
            ),
            loop=LoopStatus(
                tick=last.record.decision.tick if last else 0,
                tick_s=self._source.in_force.policy.tick,
                last_tick_s=last.tick_s if last else 0.0,
                late_ticks=self.late_ticks,
                failed_applies=self.failed_applies,
                failed_ticks=self.failed_ticks,
            ),
            journal=JournalStatus(
                writing=health.error is None,
                error=health.error,
                written=health.written,
                dropped=health.dropped,
            ),
            last_sentence=said[0] if said else None,
            last_sentence_unix_s=said[1] if said else None,
            events=self._journal.recent_events(_EVENTS_SHOWN),
            stalled=last.stalled if last else None,
            canary=self._canary(),
            doctor=None if self.doctor is None else self.doctor(),
            engine=None if self.engine is None else self.engine(),
            gpus=None if self.gpus is None else self.gpus(),
            not_kept=self.not_kept(),
            background=self.background(),
        )

    def _observed(self, last: TickOutcome) -> Observed:
        observed = observed_status(
            last.record.snapshot, last.report, last.serving, failed_reports=self.failed_reports
        )
        age_s = self._clock() - last.reported_at_s
        engine = observed.engine.model_copy(update={"report_age_s": age_s})
        return observed.model_copy(update={"engine": engine})
