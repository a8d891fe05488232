"""Carries out what the supervision decides: one engine after the other, inside one daemon.

The shell around ``supervision``: it feeds events in and does the actions. ``life`` makes one
engine, ``reporting`` has the words.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, ParamSpec

from hisparsed.config.node import NodeConfig
from hisparsed.control.api.engine import EngineBusyError, RestartPlan
from hisparsed.control.events import DAEMON
from hisparsed.control.status.document import EngineEnd, EngineLifeStatus, EngineState
from hisparsed.errors import EngineStartError, UserError
from hisparsed.node.control_plane import ControlParts
from hisparsed.node.engine import supervision
from hisparsed.node.engine.life import EngineLife, LifeFactory, StoppedWhileStarting
from hisparsed.node.engine.records import EngineRecord, evidence_document, save_evidence
from hisparsed.node.engine.reporting import EngineNews, away_words, engine_status, plan_sentence
from hisparsed.node.engine.supervision import Outcome, Values
from hisparsed.node.engine.values import EngineValues, engine_stop_s, start_limit_s
from hisparsed.node.openai.admission import STOPPING, Gate
from hisparsed.node.openai.errors import Refusal
from hisparsed.node.openai.upstream import EngineSlot
from hisparsed.node.service import ServiceManager

log = logging.getLogger("hisparsed.daemon")

P = ParamSpec("P")

_LONGEST_RETRY_S = 60.0
_TYPICAL_START_S = 15.0
"""Until a start of this node was measured."""


@dataclass(frozen=True)
class SupervisorParts:
    """What the supervisor acts on and asks."""

    control: ControlParts
    gate: Gate
    slot: EngineSlot
    manager: ServiceManager
    record: EngineRecord
    make_life: LifeFactory
    read_values: Callable[[], EngineValues]
    """What the documents say now; raises ``ConfigError``."""
    url: str


class Supervisor:
    """``config`` is the daemon's own; ``first`` is what its documents said when it started."""

    def __init__(self, config: NodeConfig, first: EngineValues, parts: SupervisorParts) -> None:
        self._config = config
        self._limits = config.supervision
        self._parts = parts
        self._wanted = self._good = first
        self._events: asyncio.Queue[supervision.Event | Exception] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._starting: asyncio.Task[None] | None = None
        self._draining: asyncio.Task[None] | None = None
        self._living: asyncio.Task[None] | None = None
        self._abort = asyncio.Event()
        self._life: EngineLife | None = None
        self._lives = 0
        self._served = 0
        self._error: Exception | None = None
        self._outcome: Outcome | None = None
        self._last_start_s: float | None = None
        self._last_end: EngineEnd | None = None
        self._changes = self._good.changes_from(self._good)
        """What the engine that is started has that the one before had not."""
        self._why = ""
        """What led to there being no engine, for people."""
        self._actor = DAEMON
        control = parts.control
        self._news = EngineNews(
            control.announcer,
            control.board,
            parts.manager,
            parts.gate,
            self._limits,
            self.away,
            parts.url,
            2 * self._stop_s(first) + start_limit_s(first.config.host_budget),
        )
        values = Values.WANTED
        aside, good = parts.record.put_aside, parts.record.good(config)
        if good is not None and aside is not None and parts.record.is_put_aside(first):
            self._good, values = good, Values.GOOD
            self._news.starts_with_good(first.changes_from(good), aside.error)
        self._state, self._first_actions = supervision.begin(values, time.monotonic())
        parts.gate.close(self.away)
        control.board.engine = self.status

    # --- the loop ---------------------------------------------------------------------

    async def run(self) -> Outcome:
        """Until the daemon is to end. Raises what kept the very first engine from starting."""
        self._do_all(self._first_actions)
        try:
            while self._outcome is None:
                event = await self._next_event()
                if isinstance(event, Exception):
                    raise event
                self._take(event)
        except BaseException:
            await self._abandon()
            raise
        if self._outcome is Outcome.NEVER_SERVED and self._error is not None:
            raise self._error
        return self._outcome

    @property
    def ever_served(self) -> bool:
        return self._served > 0

    async def _next_event(self) -> supervision.Event | Exception:
        due_s = self._state.next_try_s
        if due_s is None:
            return await self._events.get()
        try:
            return await asyncio.wait_for(self._events.get(), max(0.0, due_s - time.monotonic()))
        except TimeoutError:
            return supervision.Due()

    def _take(self, event: supervision.Event) -> None:
        before = self._state
        self._state, actions = supervision.step(before, event, time.monotonic(), self._limits)
        self._tell(event)
        if self._state.phase is not before.phase or self._state.stopping is not before.stopping:
            self._news.entered(self._state, drain_s=self._config.drain_timeout)
        if self._state.phase is EngineState.SERVING and isinstance(event, supervision.Ready):
            self._serve()
        self._do_all(actions)

    def _tell(self, event: supervision.Event) -> None:
        state, wait_s = self._state, None
        if state.next_try_s is not None:
            wait_s = max(0.0, state.next_try_s - time.monotonic())
        match event:
            case supervision.Died() if state.phase in (EngineState.RESTARTING, EngineState.FAILED):
                self._why = event.why
                self._news.died(event, state)
            case supervision.StartFailed(why) if state.served and not state.stopping:
                self._why = f"it did not start: {why}"
                self._news.start_failed(why, wait_s)
            case supervision.Cleared() if self._why and self._last_end is not None:
                self._news.cleared(self._last_end, wait_s)
            case supervision.Drained() if state.phase is EngineState.STOPPED:
                self._news.stopped(self._parts.gate.open_requests)

    async def _abandon(self) -> None:
        """A mistake of the daemon, or its end by force: leave no engine behind."""
        self._abort.set()
        if self._starting is not None and not self._starting.done():
            await asyncio.wait({self._starting})
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._parts.slot.take_away(STOPPING)
        if self._life is not None:
            await self._life.end(kill=False)

    def _spawn(
        self, work: Callable[P, Coroutine[Any, Any, supervision.Event]], *a: P.args, **kw: P.kwargs
    ) -> asyncio.Task[None]:
        """Do it beside the loop; the event that it ends in comes in, or what it raised."""

        async def post() -> None:
            try:
                self._events.put_nowait(await work(*a, **kw))
            except Exception as error:
                self._events.put_nowait(error)

        task = asyncio.create_task(post())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- what others ask --------------------------------------------------------------

    def ask_stop(self) -> None:
        """Drain and end; a second time, without waiting for the open calls."""
        self._events.put_nowait(supervision.StopAsked(self._config.drain_timeout))

    def status(self) -> EngineLifeStatus:
        put_aside = self._parts.record.put_aside
        if not self._parts.record.is_put_aside(self._wanted):
            put_aside = None
        return engine_status(
            self._state,
            self._limits,
            now_s=time.monotonic(),
            now_unix_s=time.time(),
            why=self._why,
            served=self._served,
            last_start_s=self._last_start_s,
            last_end=self._last_end,
            put_aside=put_aside,
            changes=self._wanted.changes_from(self._good),
        )

    def away(self) -> Refusal:
        """What clients are told while no call can start."""
        state = self._state
        if state.stopping or state.phase is EngineState.FAILED:
            return STOPPING
        now_s = time.monotonic()
        left_s = start_s = self._last_start_s or _TYPICAL_START_S
        if state.next_try_s is not None:
            left_s += max(0.0, state.next_try_s - now_s)
        elif state.phase is EngineState.STARTING:
            left_s = max(1.0, start_s - (now_s - state.since_s))
        retry_s = min(_LONGEST_RETRY_S, math.ceil(left_s))
        return Refusal(503, "engine_unavailable", away_words(state), retry_s)

    def plan_restart(self, drain_s: float | None) -> RestartPlan:
        """As ``EngineControl``."""
        return self._plan(drain_s)[0]

    def restart(self, drain_s: float | None, *, actor: str) -> RestartPlan:
        """As ``EngineControl``."""
        plan, self._wanted = self._plan(drain_s)
        self._actor = actor
        self._news.restart_begun(plan.sentence, actor)
        # Taken at once: a second one must find it going on.
        self._take(supervision.RestartAsked(plan.drain_s, changes=bool(plan.changes)))
        return plan.model_copy(update={"begun": True})

    def _plan(self, drain_s: float | None) -> tuple[RestartPlan, EngineValues]:
        state = self._state
        waits = state.phase is EngineState.RESTARTING and state.next_try_s is not None
        if state.stopping or not (state.phase is EngineState.SERVING or waits):
            raise EngineBusyError(
                f"no restart can begin now: {self.status().sentence}; look at `hisparsed status` "
                "and try again"
            )
        read = self._parts.read_values()
        changes = read.changes_from(self._good)
        left = read.left_for_daemon(EngineValues(self._config, 0.0))
        calls = self._parts.gate.open_requests
        drain_s = self._config.drain_timeout if drain_s is None else drain_s
        plan = RestartPlan(
            sentence=plan_sentence(calls, drain_s, changes, left, self._last_start_s),
            open_requests=calls,
            drain_s=drain_s,
            changes=list(changes),
            left=list(left),
        )
        return plan, read.within(self._config)

    # --- doing ------------------------------------------------------------------------

    def _do_all(self, actions: tuple[supervision.Action, ...]) -> None:
        for action in actions:
            self._do(action)

    def _do(self, action: supervision.Action) -> None:
        match action:
            case supervision.Launch(values):
                chosen = self._wanted if values is Values.WANTED else self._good
                self._starting = self._spawn(self._start, chosen)
            case supervision.AbortStart():
                self._abort.set()
            case supervision.Drain(within_s):
                self._stop_draining()
                self._draining = self._spawn(self._drain, within_s)
            case supervision.CutDrain():
                self._stop_draining()
                self._events.put_nowait(supervision.Drained())
            case supervision.TakeDown(why, kill):
                self._stop_draining()
                self._spawn(self._take_down, why, kill)
            case supervision.Quarantine(why):
                self._quarantine(why)
            case supervision.End(outcome):
                self._outcome = outcome
                if outcome is Outcome.GIVEN_UP:
                    self._news.given_up(self._state)

    def _stop_draining(self) -> None:
        if self._draining is not None:
            self._draining.cancel()

    async def _start(self, values: EngineValues) -> supervision.Event:
        began_s = time.monotonic()
        self._lives += 1
        self._life = self._parts.make_life(values, self._lives)
        limit_s = start_limit_s(values.config.host_budget)
        try:
            async with self._parts.manager.busy("Starting the engine", at_most_s=limit_s):
                await self._life.start(self._abort)
        except StoppedWhileStarting:
            return supervision.StartFailed("told to stop while starting")
        except Exception as error:
            self._error = error
            if self.ever_served:
                log.debug("The engine did not start.", exc_info=True)
            told = error.why if isinstance(error, EngineStartError) else str(error)
            why = (told or type(error).__name__).rstrip(".")
            refused = isinstance(error, UserError) and not isinstance(error, EngineStartError)
            self._last_end = EngineEnd(at_unix_s=time.time(), why=f"it did not start: {why}")
            self._life = None
            return supervision.StartFailed(why, refused=refused)
        self._last_start_s = time.monotonic() - began_s
        self._changes = values.changes_from(self._good)
        self._good = values
        return supervision.Ready()

    def _serve(self) -> None:
        life = self._life
        if life is None:
            raise RuntimeError("an engine is ready that was not started")
        self._served += 1
        self._parts.slot.put(life.app, life.is_alive)
        self._parts.record.keep_good(self._good)
        self._parts.control.now_runs(self._good.config)
        if self._served > 1:
            self._news.ready(self._last_start_s or 0.0, self._changes, self._actor)
        self._why, self._actor = "", DAEMON
        self._living = self._spawn(life.until_end)

    async def _drain(self, within_s: float) -> supervision.Event:
        gate = self._parts.gate
        log.info("Draining: %d calls open, at most %gs.", gate.open_requests, within_s)
        async with self._parts.manager.busy("Draining", at_most_s=within_s):
            await gate.all_ended(within_s)
        return supervision.Drained()

    async def _take_down(self, why: str | None, kill: bool) -> supervision.Event:
        life = self._life
        if life is None:
            return supervision.Cleared()
        if self._living is not None:
            self._living.cancel()
        self._parts.slot.take_away(self.away())
        stop_s = self._stop_s(self._good)
        if self._state.stopping or self._state.phase is EngineState.FAILED:
            self._parts.manager.stopping("Stopping the engine", within_s=2 * stop_s)
        async with self._parts.manager.busy("Stopping the engine", at_most_s=2 * stop_s):
            last, at_unix_s = life.last, time.time()
            processes = await life.end(kill=kill)
        self._life = None
        if why is not None:
            evidence = await self._keep(why, at_unix_s, processes, last)
            self._last_end = EngineEnd(
                at_unix_s=at_unix_s, why=why, processes=processes, evidence=evidence
            )
        return supervision.Cleared()

    async def _keep(
        self, why: str, at_unix_s: float, processes: list[str], last: Any
    ) -> str | None:
        control = self._parts.control
        document = evidence_document(
            why,
            at_unix_s,
            processes=processes,
            status=control.board.status(),
            last=last,
            lines=control.views.logs.lines(limit=1_000),
            ticks=control.journal.ticks,
        )
        try:
            return str(await asyncio.to_thread(save_evidence, control.state_dir, document))
        except OSError as error:
            log.warning("The evidence could not be written: %s.", error.strerror or error)
            return None

    def _quarantine(self, why: str) -> None:
        self._parts.record.put(self._wanted, why, time.time())
        self._news.quarantined(why, self._wanted.changes_from(self._good), self._actor)

    @staticmethod
    def _stop_s(values: EngineValues) -> float:
        return engine_stop_s(values.config.host_budget)
