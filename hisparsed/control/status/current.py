"""The node's status now: the loop passes in each finished tick, all others read.

``CurrentStatus.status`` builds the document from the last tick and the parts around it; ``unready``
says why the node should get no requests. Keeps the latest tick only: ``history`` and the journal
have the past.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from hisparsed.control.events import Broadcast, Message
from hisparsed.control.holds import Holds
from hisparsed.control.journal.journal import Journal
from hisparsed.control.journal.records import TickRecord, view_tick
from hisparsed.control.live_policy import PolicySource
from hisparsed.control.status.document import (
    BackgroundStatus,
    CanaryStatus,
    DoctorStatus,
    EngineState,
    EngineStatus,
    JournalStatus,
    LeverStatus,
    Lifecycle,
    LoopStatus,
    NodeInfo,
    PolicyStatus,
    ScheduleStatus,
    Status,
)
from hisparsed.engine.cuda.nvml import GpusStatus
from hisparsed.engine.kernel_choice import KernelsStatus
from hisparsed.policy.decisions import Decision, Reason, effective_text
from hisparsed.policy.derived import derive
from hisparsed.policy.keys import PendingRestart
from hisparsed.policy.schema import Policy
from hisparsed.policy.signals import Lever, Snapshot


def schedule_statuses(source: PolicySource) -> list[ScheduleStatus]:
    active = source.in_force.active
    return [
        ScheduleStatus(name=entry.name, active=index in active)
        for index, entry in enumerate(source.active.value.schedules)
    ]


def lever_statuses(
    policy: Policy, decision: Decision, frozen: frozenset[Lever]
) -> list[LeverStatus]:
    return [
        LeverStatus(
            lever=one.lever,
            mode=policy.mode_of(one.lever),
            frozen=one.lever in frozen,
            pending_restart=one.reason is Reason.PENDING_RESTART,
            current=one.current,
            wanted=one.wanted,
            reason=one.reason,
            limited_by=one.limited_by,
            sentence=one.sentence,
        )
        for one in decision.levers
    ]


_EVENTS_SHOWN = 5
_REPORTING = (EngineState.SERVING, EngineState.DRAINING)


@dataclass(frozen=True, slots=True)
class TickOutcome:
    """One finished tick. ``policy`` includes the operator's holds."""

    record: TickRecord
    policy: Policy
    reported_at_s: float
    tick_s: float
    stalled: str | None = None
    """The sentence for calls that make no progress although memory is free; ``None`` when they
    progress.
    """


OnTick = Callable[[TickOutcome], None]


@dataclass(slots=True)
class LoopCounters:
    """Over all control loops of this daemon, one after the other."""

    failed_reports: int = 0
    failed_applies: int = 0
    failed_ticks: int = 0
    late_ticks: int = 0


@dataclass(frozen=True, slots=True)
class StatusSources:
    """Parts of the status that the loop does not provide. The defaults: a node without them."""

    lifecycle: Callable[[], Lifecycle] = lambda: Lifecycle.SERVING
    engine: Callable[[], EngineStatus | None] = lambda: None
    canary: Callable[[], CanaryStatus | None] = lambda: None
    """``None`` while no engine serves."""
    doctor: Callable[[], DoctorStatus | None] = lambda: None
    gpus: Callable[[], GpusStatus | None] = lambda: None
    kernels: Callable[[], KernelsStatus | None] = lambda: None
    background: Callable[[], list[BackgroundStatus]] = list
    not_kept: Callable[[], list[str]] = list
    """Files of the state folder that cannot be written, and why."""
    node_pending: Callable[[], tuple[PendingRestart, ...]] = tuple
    """Values of the node's document that differ from the running ones."""
    on_tick: Callable[[], Iterable[OnTick]] = tuple
    """The listeners of a finished tick, in this order; read at each tick."""


class CurrentStatus:
    """``clock`` is monotonic seconds, ``wall_clock`` Unix seconds."""

    def __init__(
        self,
        node: NodeInfo,
        source: PolicySource,
        holds: Holds,
        journal: Journal,
        broadcast: Broadcast,
        sources: StatusSources,
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self.node = node
        self.counters = LoopCounters()
        self._source = source
        self._holds = holds
        self._journal = journal
        self._broadcast = broadcast
        self._sources = sources
        self._clock = clock
        self._wall_clock = wall_clock
        self._last: TickOutcome | None = None
        self._said: tuple[str, float] | None = None

    @property
    def lifecycle(self) -> Lifecycle:
        return self._sources.lifecycle()

    def show(self, outcome: TickOutcome) -> None:
        """Take in a finished tick and notify the listeners.

        Raises the error of a listener after all have had the tick.
        """
        self._last = outcome
        record = outcome.record
        if record.sentence is not None:
            self._said = (record.sentence, record.at_unix_s)
        failed: Exception | None = None
        for watch in self._sources.on_tick():
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
        """Seconds since the engine's last report; ``None`` before the first tick."""
        return None if self._last is None else self._clock() - self._last.reported_at_s

    def unready(self) -> str | None:
        """Why the node should get no requests; ``None`` if it should get them."""
        engine = self._sources.engine()
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
        canary = self._sources.canary()
        if canary is not None and canary.not_ready:
            return f"the canary gave a different answer: {canary.sentence}"
        return None

    def pending_restart(self) -> list[PendingRestart]:
        """Values of the policy and of the node's document that only a restart puts in force."""
        return [*self._source.pending_restart(), *self._sources.node_pending()]

    def status(self) -> Status:
        """The document now; the report's age is that of now, not of the last tick."""
        last, said, health = self._last, self._said, self._journal.health
        engine = self._sources.engine()
        # The figures of a dead engine are not current.
        reported = last if engine is None or engine.state in _REPORTING else None
        active = self._source.active
        frozen = self._holds.frozen
        policy = self._holds.over(self._source.in_force.policy)
        return Status(
            at_unix_s=self._wall_clock(),
            node=self.node,
            lifecycle=self.lifecycle,
            observed=self._observed(reported) if reported is not None else None,
            derived=derive(reported.record.snapshot) if reported is not None else None,
            levers=lever_statuses(policy, last.record.decision, frozen) if last else [],
            policy=PolicyStatus(
                path=str(active.path),
                generation=active.generation,
                content_hash=active.content_hash,
                mode=self._source.in_force.policy.mode,
                effective=effective_text(
                    (policy.mode_of(lever).value, lever in frozen) for lever in Lever
                ),
                overridden=dict(self._holds.modes),
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
                late_ticks=self.counters.late_ticks,
                failed_reports=self.counters.failed_reports,
                failed_applies=self.counters.failed_applies,
                failed_ticks=self.counters.failed_ticks,
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
            canary=self._sources.canary(),
            doctor=self._sources.doctor(),
            engine=engine,
            gpus=self._sources.gpus(),
            kernels=self._sources.kernels(),
            not_kept=self._sources.not_kept(),
            background=self._sources.background(),
        )

    def _observed(self, last: TickOutcome) -> Snapshot:
        age_s = self._clock() - last.reported_at_s
        return replace(last.record.snapshot, report_age_s=age_s, requests_hot=())
