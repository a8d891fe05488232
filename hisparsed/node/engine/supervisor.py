"""Carries out the decisions of the supervision: one engine after the other, inside one daemon.

The shell around ``supervision``: it feeds events in and does the actions. ``session`` starts one
engine, ``lifecycle`` is the state that others read, ``reporting`` has the texts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, ParamSpec

from hisparsed.control.api.engine import EngineBusyError, RestartPlan
from hisparsed.control.events import DAEMON
from hisparsed.control.status.current import TickOutcome
from hisparsed.control.status.document import EngineEnd, EngineState, Status
from hisparsed.errors import EngineStartError, MachineShortError, UserError
from hisparsed.node.engine import supervision
from hisparsed.node.engine.records import evidence_document, save_evidence, start_error
from hisparsed.node.engine.reporting import EngineReporter, plan_sentence
from hisparsed.node.engine.session import EngineSession
from hisparsed.node.engine.start import StoppedWhileStarting
from hisparsed.node.engine.supervision import Outcome, Values
from hisparsed.node.engine.values import EngineValues, engine_stop_s, start_limit_s
from hisparsed.node.openai.admission import STOPPING
from hisparsed.node.openai.upstream import How
from hisparsed.policy.keys import PendingRestart
from hisparsed.policy.units import counted

if TYPE_CHECKING:
    from hisparsed.node.node import Node

log = logging.getLogger("hisparsed.daemon")

P = ParamSpec("P")
_LOG_LINES = 1_000
"""Latest log lines that are searched when an engine has ended."""


StartSession = Callable[[EngineValues, int, asyncio.Event], Awaitable[EngineSession]]
"""Starts the n-th engine of the daemon; ends the start once the event is set."""


class Supervisor:
    """The only one that changes ``node.lifecycle``.

    ``read_values`` returns the values of the documents now; it raises ``ConfigError``.
    """

    def __init__(
        self, node: Node, start_session: StartSession, read_values: Callable[[], EngineValues]
    ) -> None:
        self._node = node
        self._lifecycle = node.lifecycle
        self._start_session = start_session
        self._read_values = read_values
        self._events: asyncio.Queue[supervision.Event | Exception] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._starting: asyncio.Task[None] | None = None
        self._draining: asyncio.Task[None] | None = None
        self._living: asyncio.Task[None] | None = None
        self._ending: EngineSession | None = None
        self._abort = asyncio.Event()
        self._starts = 0
        self._error: Exception | None = None
        self._outcome: Outcome | None = None
        self._told_cut = 0
        self._changes: tuple[PendingRestart, ...] = ()
        """The values of the next engine that differ from those of the previous one."""
        self._actor = DAEMON
        first = node.lifecycle.wanted
        self._reporter = EngineReporter(
            node.plane.recorder,
            node.manager,
            node.config.supervision,
            node.plane.status.node.api_url,
            2 * _stop_s(first) + start_limit_s(first.config),
        )

    # --- the loop ---------------------------------------------------------------------

    async def run(self) -> Outcome:
        """Runs until the daemon should end. Raises the error that prevented the very first
        start."""
        self._first_launch()
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

    def _first_launch(self) -> None:
        lifecycle = self._lifecycle
        quarantined, values = lifecycle.quarantined, lifecycle.state.values
        if values is Values.GOOD and quarantined is not None:
            changes = lifecycle.wanted.changes_from(lifecycle.good)
            self._reporter.starts_with_good(changes, quarantined.error)
        self._do(supervision.LaunchEngine(values))

    @property
    def ever_served(self) -> bool:
        return self._lifecycle.served > 0

    async def _next_event(self) -> supervision.Event | Exception:
        due_s = self._lifecycle.state.next_try_s
        if due_s is None:
            return await self._events.get()
        try:
            return await asyncio.wait_for(self._events.get(), max(0.0, due_s - time.monotonic()))
        except TimeoutError:
            return supervision.RetryDue()

    def _take(self, event: supervision.Event) -> None:
        lifecycle, before = self._lifecycle, self._lifecycle.state
        now, actions = supervision.step(before, event, time.monotonic(), lifecycle.limits)
        lifecycle.state = now
        self._tell(event)
        if now.phase is not before.phase or now.stopping is not before.stopping:
            self._entered(now)
        if now.phase is EngineState.SERVING and isinstance(event, supervision.EngineReady):
            self._serve()
        self._do_all(actions)

    def _entered(self, state: supervision.Supervision) -> None:
        if state.phase is not EngineState.SERVING:
            self._node.admission.release_held()
        self._reporter.entered(state, drain_s=self._node.config.drain_timeout)

    def _tell(self, event: supervision.Event) -> None:
        lifecycle, state, wait_s = self._lifecycle, self._lifecycle.state, None
        if state.next_try_s is not None:
            wait_s = max(0.0, state.next_try_s - time.monotonic())
        match event:
            case supervision.Died() if state.phase in (EngineState.RESTARTING, EngineState.FAILED):
                lifecycle.why = event.why
                self._reporter.died(event, state)
            case supervision.StartFailed(why) if not state.stopping and (
                state.served or state.phase is EngineState.RESTARTING
            ):
                lifecycle.why = f"it did not start: {why}"
                self._reporter.start_failed(why, wait_s)
            case supervision.Cleared() if lifecycle.why and lifecycle.last_end is not None:
                self._reporter.cleared(lifecycle.last_end, wait_s)
            case supervision.Drained() if state.phase is EngineState.STOPPED:
                self._reporter.stopped(self._node.admission.open_requests)

    async def _abandon(self) -> None:
        """An error of the daemon, or its end by force: leave no engine behind."""
        self._abort.set()
        if self._starting is not None and not self._starting.done():
            await asyncio.wait({self._starting})
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        session = self._lifecycle.session or self._ending
        self._lifecycle.session = None
        if session is not None:
            self._node.upstream.cut(STOPPING, session.background)
            await session.end(kill=False)

    def _spawn(
        self, work: Callable[P, Coroutine[Any, Any, supervision.Event]], *a: P.args, **kw: P.kwargs
    ) -> asyncio.Task[None]:
        """Run it as a task next to the loop; its final event, or its error, is put into the
        queue."""

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
        self._events.put_nowait(supervision.StopAsked(self._node.config.drain_timeout))

    def plan_restart(self, drain_s: float | None) -> RestartPlan:
        """As ``EngineRestarter``."""
        return self._plan(drain_s)[0]

    def restart(self, drain_s: float | None, *, actor: str) -> RestartPlan:
        """As ``EngineRestarter``."""
        plan, self._lifecycle.wanted = self._plan(drain_s)
        self._actor = actor
        self._reporter.restart_begun(plan.sentence, actor)
        # Taken at once: a second request must find the first in progress.
        self._take(supervision.RestartAsked(plan.drain_s, changes=bool(plan.changes)))
        return plan.model_copy(update={"begun": True})

    def _plan(self, drain_s: float | None) -> tuple[RestartPlan, EngineValues]:
        lifecycle, state = self._lifecycle, self._lifecycle.state
        waits = state.phase is EngineState.RESTARTING and state.next_try_s is not None
        if state.stopping or not (state.phase is EngineState.SERVING or waits):
            raise EngineBusyError(
                f"a restart cannot begin now: {lifecycle.status().sentence}; look at "
                "`hisparsed status` and try again"
            )
        read = self._read_values()
        changes = read.changes_from(lifecycle.good)
        left = read.left_for_daemon(EngineValues(self._node.config, 0.0))
        calls = self._node.admission.open_requests
        drain_s = self._node.config.drain_timeout if drain_s is None else drain_s
        plan = RestartPlan(
            sentence=plan_sentence(calls, drain_s, changes, left, lifecycle.last_start_s),
            open_requests=calls,
            drain_s=drain_s,
            changes=list(changes),
            left=list(left),
        )
        return plan, read.within(self._node.config)

    # --- doing ------------------------------------------------------------------------

    def _do_all(self, actions: tuple[supervision.Action, ...]) -> None:
        for action in actions:
            self._do(action)

    def _do(self, action: supervision.Action) -> None:
        match action:
            case supervision.LaunchEngine(values):
                lifecycle = self._lifecycle
                chosen = lifecycle.wanted if values is Values.WANTED else lifecycle.good
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
                    self._reporter.given_up(self._lifecycle.state)

    def _stop_draining(self) -> None:
        if self._draining is not None:
            self._draining.cancel()

    async def _start(self, values: EngineValues) -> supervision.Event:
        lifecycle, began_s = self._lifecycle, time.monotonic()
        self._starts += 1
        limit_s = start_limit_s(values.config)
        try:
            async with self._node.manager.busy("Starting the engine", at_most_s=limit_s):
                session = await self._start_session(values, self._starts, self._abort)
        except StoppedWhileStarting:
            return supervision.StartFailed("stopped while starting")
        except Exception as error:
            if self.ever_served:
                log.debug("The engine did not start.", exc_info=True)
            else:
                self._error = error
            return await self._start_failed(error)
        lifecycle.session = session
        lifecycle.last_start_s = time.monotonic() - began_s
        self._changes = values.changes_from(lifecycle.good)
        lifecycle.good = values
        return supervision.EngineReady()

    async def _start_failed(self, error: Exception) -> supervision.StartFailed:
        """Write its evidence. No process of the engine is left."""
        self._look_for_kernel_errors()
        started = isinstance(error, EngineStartError)
        passing = started or isinstance(error, MachineShortError)
        processes = list(error.processes) if isinstance(error, EngineStartError) else []
        told = error.why if isinstance(error, EngineStartError) else str(error)
        if isinstance(error, EngineStartError) and not error.killed:
            told = start_error(self._node.views.logs.lines(limit=1_000, source="engine")) or told
        why = (told or type(error).__name__).rstrip(".")
        said, at_unix_s, evidence = f"it did not start: {why}", time.time(), None
        if isinstance(error, EngineStartError):
            status = self._node.plane.status.status()
            evidence = await self._keep(self._evidence(said, at_unix_s, processes, status, None))
            if self._error is error:
                where = f"; evidence: {evidence}" if evidence is not None else ""
                self._error = EngineStartError(
                    why + where, processes=error.processes, killed=error.killed
                )
        self._lifecycle.last_end = EngineEnd(
            at_unix_s=at_unix_s, why=said, processes=processes, evidence=evidence
        )
        return supervision.StartFailed(
            why,
            refused=isinstance(error, UserError) and not passing,
            killed=isinstance(error, EngineStartError) and error.killed,
        )

    def _serve(self) -> None:
        lifecycle = self._lifecycle
        if lifecycle.session is None:
            raise RuntimeError("an engine is ready that was not started")
        lifecycle.served += 1
        lifecycle.record.keep_good(lifecycle.good, lifecycle.last_start_s)
        self._node.node_file.now_runs(lifecycle.good.config)
        if lifecycle.served > 1:
            self._reporter.ready(lifecycle.last_start_s or 0.0, self._changes, self._actor)
        lifecycle.why, self._actor = "", DAEMON
        self._living = self._spawn(lifecycle.session.until_end)

    async def _drain(self, within_s: float) -> supervision.Event:
        admission = self._node.admission
        log.info("Draining: %d calls open, at most %gs.", admission.open_requests, within_s)
        async with self._node.manager.busy("Draining", at_most_s=within_s):
            await admission.all_ended(within_s)
        return supervision.Drained()

    async def _take_down(self, why: str | None, kill: bool) -> supervision.Event:
        lifecycle, manager = self._lifecycle, self._node.manager
        session = lifecycle.session
        if session is None:
            return supervision.Cleared()
        if self._living is not None:
            self._living.cancel()
        status, at_unix_s = self._node.plane.status.status(), time.time()
        lifecycle.session, self._ending = None, session
        upstream = self._node.upstream
        upstream.cut(lifecycle.away(), session.background)
        stop_s = _stop_s(lifecycle.good)
        if lifecycle.state.stopping or lifecycle.state.phase is EngineState.FAILED:
            manager.stopping("Stopping the engine", within_s=2 * stop_s)
        async with manager.busy("Stopping the engine", at_most_s=2 * stop_s):
            processes = await session.end(kill=kill)
        self._ending = None
        cut, self._told_cut = upstream.ended[How.CUT] - self._told_cut, upstream.ended[How.CUT]
        if cut:
            log.warning("Cut off %s; clients got an error.", counted(cut, "call"))
        if why is not None:
            self._look_for_kernel_errors()
            document = self._evidence(why, at_unix_s, processes, status, session.latest.outcome)
            lifecycle.last_end = EngineEnd(
                at_unix_s=at_unix_s,
                why=why,
                processes=processes,
                evidence=await self._keep(document),
            )
        return supervision.Cleared()

    def _look_for_kernel_errors(self) -> None:
        if self._node.kernels is not None:
            self._node.kernels.engine_ended(self._node.views.logs.lines(limit=_LOG_LINES))

    def _evidence(
        self,
        why: str,
        at_unix_s: float,
        processes: list[str],
        status: Status,
        last: TickOutcome | None,
    ) -> dict[str, Any]:
        return evidence_document(
            why,
            at_unix_s,
            processes=processes,
            status=status,
            last=last,
            lines=self._node.views.logs.lines(limit=_LOG_LINES),
            ticks=self._node.plane.journal.ticks,
        )

    async def _keep(self, document: dict[str, Any]) -> str | None:
        try:
            folder = self._node.config.state_dir
            return str(await asyncio.to_thread(save_evidence, folder, document))
        except OSError as error:
            log.warning("The evidence could not be written: %s.", error.strerror or error)
            return None

    def _quarantine(self, why: str) -> None:
        self._lifecycle.record.quarantine(self._lifecycle.wanted, why, time.time())
        changes = self._lifecycle.wanted.changes_from(self._lifecycle.good)
        self._reporter.quarantined(why, changes, self._actor)


def _stop_s(values: EngineValues) -> float:
    return engine_stop_s(values.config)
