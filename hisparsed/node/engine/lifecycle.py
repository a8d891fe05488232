"""The phase of the engine: plain data that the supervisor writes and others read.

Also what it means to clients (``refusal``), operators (``status``) and health checks
(``lifecycle``). It lives as long as the daemon; ``session`` comes and goes.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass

from hisparsed.config.node import NodeConfig
from hisparsed.config.sections import SupervisionConfig
from hisparsed.control.status.document import (
    EngineEnd,
    EngineState,
    EngineStatus,
    Lifecycle,
    QuarantinedValues,
)
from hisparsed.node.engine import supervision
from hisparsed.node.engine.records import EngineRecord, Quarantined
from hisparsed.node.engine.session import EngineSession
from hisparsed.node.engine.supervision import Supervision, Values
from hisparsed.node.engine.values import EngineValues
from hisparsed.node.openai.admission import STOPPING
from hisparsed.node.openai.errors import Refusal
from hisparsed.policy.units import format_duration

_LONGEST_RETRY_S = 48.0
_JITTER = 0.25
"""The most that is added, so that clients do not all return at the same time."""
_OVERDUE = 0.25
"""The share of the time so far that a start may still take, if it takes longer than the last
one."""
_TYPICAL_START_S = 15.0
"""Used until a start of this node was measured."""


@dataclass(slots=True)
class EngineLifecycle:
    """Only the supervisor may change it."""

    limits: SupervisionConfig
    record: EngineRecord
    state: Supervision
    wanted: EngineValues
    """The values of the documents when the daemon started, or when a restart was asked for."""
    good: EngineValues
    """The values that the latest engine served with, or that the first one starts with."""
    session: EngineSession | None = None
    """The engine that serves, or drains; ``None`` while there is none."""
    served: int = 0
    """The number of engines that served."""
    why: str = ""
    """Why there is no engine, for people."""
    last_start_s: float | None = None
    last_end: EngineEnd | None = None

    @classmethod
    def first(
        cls, config: NodeConfig, values: EngineValues, record: EngineRecord
    ) -> EngineLifecycle:
        """Before the first engine; with the last good values if ``values`` start none."""
        good = record.good(config) if record.is_quarantined(values) else None
        chosen = Values.WANTED if good is None else Values.GOOD
        state, _ = supervision.begin(chosen, time.monotonic())
        return cls(config.supervision, record, state, wanted=values, good=good or values)

    @property
    def quarantined(self) -> Quarantined | None:
        """Set while it is known that the wanted values do not start an engine."""
        return self.record.quarantined if self.record.is_quarantined(self.wanted) else None

    @property
    def lifecycle(self) -> Lifecycle:
        state = self.state
        match state.phase:
            case EngineState.STARTING:
                return Lifecycle.RESTARTING if state.served else Lifecycle.STARTING
            case EngineState.SERVING:
                return Lifecycle.SERVING
            case EngineState.DRAINING:
                return Lifecycle.DRAINING
            case EngineState.RESTARTING:
                return Lifecycle.RESTARTING
            case EngineState.FAILED:
                return Lifecycle.ENGINE_GONE
            case EngineState.STOPPED:
                return Lifecycle.STOPPED

    def refusal(self) -> Refusal | None:
        """Why no call can start; ``None`` while calls can."""
        return None if self.state.phase is EngineState.SERVING else self.away()

    def away(self) -> Refusal:
        """The answer to a client whose call no engine can answer."""
        state = self.state
        if state.stopping or state.phase is EngineState.FAILED:
            return STOPPING
        now_s = time.monotonic()
        left_s = start_s = self.last_start_s or self.record.start_s or _TYPICAL_START_S
        if state.next_try_s is not None:
            left_s += max(0.0, state.next_try_s - now_s)
        elif state.phase is EngineState.STARTING:
            took_s = now_s - state.since_s
            left_s = max(1.0, start_s - took_s, _OVERDUE * took_s)
        does = "is restarting"
        if state.phase is EngineState.STARTING and not state.served:
            does = "is starting"
        words = f"this node's engine {does}; retry later, or elsewhere"
        longer = 1 + _JITTER * random.random()
        retry_s = math.ceil(min(_LONGEST_RETRY_S, left_s) * longer)
        return Refusal(503, "engine_unavailable", words, retry_s)

    def status(self) -> EngineStatus:
        """The state now."""
        state, failed = self.state, self.quarantined
        now_s, now_unix_s = time.monotonic(), time.time()
        quarantined = None
        if failed is not None:
            quarantined = QuarantinedValues(
                at_unix_s=failed.at_unix_s,
                error=failed.error,
                changes=list(self.wanted.changes_from(self.good)),
            )
        next_try_unix_s = None
        if state.next_try_s is not None:
            next_try_unix_s = now_unix_s + state.next_try_s - now_s
        return EngineStatus(
            state=state.phase,
            since_unix_s=now_unix_s + state.since_s - now_s,
            sentence=self._sentence(now_s),
            died_total=state.died_total,
            restarts_total=max(0, self.served - 1),
            planned_restarts_total=state.planned_total,
            ends_in_window=sum(now_s - at_s < self.limits.window for at_s in state.ends_s),
            most_restarts=self.limits.most_restarts,
            last_start_s=self.last_start_s,
            next_try_unix_s=next_try_unix_s,
            last_exit=self.last_end,
            quarantined=quarantined,
        )

    def _sentence(self, now_s: float) -> str:
        state = self.state
        since = format_duration(max(0, round(now_s - state.since_s)))
        after = f" after: {self.why}" if self.why else ""
        match state.phase:
            case EngineState.STARTING:
                return f"the engine has been starting for {since}{after}"
            case EngineState.SERVING:
                return f"the engine has served for {since}"
            case EngineState.DRAINING:
                what = "the daemon stops" if state.stopping else "the engine is restarted"
                return f"open calls end, for {since} now, before {what}"
            case EngineState.RESTARTING if state.next_try_s is not None:
                left = format_duration(max(0, round(state.next_try_s - now_s)))
                tries = f"{len(state.ends_s)} of {self.limits.most_restarts} restarts used"
                return f"no engine{after}; the next try comes in {left} ({tries})"
            case EngineState.RESTARTING:
                return f"the engine is being stopped{after}"
            case EngineState.FAILED:
                return f"the engine was given up{after}; the daemon ends"
            case EngineState.STOPPED:
                return "the daemon stops"
