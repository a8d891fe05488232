"""One engine that serves, with all that is made for it alone, until its processes have ended.

The OpenAI application, the control loop, the canary and the watchdog begin and end with it.
``start_session`` returns it complete. The launch blocks for seconds or minutes, so it runs in a
thread and the daemon answers meanwhile. A stop ends the processes that were begun, which makes vLLM
give up at once. What comes after an end is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from hisparsed.canary.watch import CanaryAsker, CanaryWatch
from hisparsed.control.loop import ControlLoop
from hisparsed.control.status.current import OnTick, TickOutcome
from hisparsed.engine.port import EngineGone
from hisparsed.errors import EngineStartError
from hisparsed.node.engine.processes import EngineProcesses, ProcessesSince
from hisparsed.node.engine.records import RestartFile
from hisparsed.node.engine.supervision import Died
from hisparsed.node.engine.values import EngineValues, engine_stop_s
from hisparsed.node.engine.watchdog import ReportAge, StallWatchdog
from hisparsed.node.openai.session_limit import Queue
from hisparsed.policy.units import format_duration

if TYPE_CHECKING:
    from hisparsed.engine.launch import EngineHandle
    from hisparsed.node.node import Node


class StoppedWhileStarting(BaseException):
    """The node was told to stop before the engine served."""


WORKER_STOP_ENV = "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"
"""vLLM gives its workers five seconds, in which no large pool is unpinned."""
_RPC_FOLDER_ENV = "VLLM_RPC_BASE_PATH"
"""Where vLLM's processes put the sockets between them. Only these go with each engine: what
libraries keep for temporary files may be wanted by the next one."""
_TERMINATE_EVERY_S = 0.1
_LOOK_EVERY_S = 0.2
_CUT_WITHIN_S = 2.0
"""Calls that were cut end at once; their clients may be slow to take the last word."""


# --- while it serves ------------------------------------------------------------------


@dataclass(frozen=True)
class _Engine:
    """The engine core and its processes."""

    handle: EngineHandle
    frontend: Any
    """Arguments of vLLM's OpenAI application."""
    processes: EngineProcesses
    folder: Path
    stop_s: float

    async def stop(self, *, kill: bool) -> list[str]:
        """Stop it and free what it held; how each of its processes ended, in words."""
        exits = await asyncio.to_thread(self._stop, kill)
        self.processes.free()
        shutil.rmtree(self.folder, ignore_errors=True)
        return exits

    def _stop(self, kill: bool) -> list[str]:
        """Blocks. Only what does not come to an end is killed: its way out may unpin memory."""
        if kill:
            self.processes.kill()
        self.handle.shutdown(self.stop_s)
        killed = self.processes.end_within(self.stop_s, kill=kill)
        return self.processes.exits(killed=killed)


@dataclass(slots=True)
class LatestTick:
    """Of one engine; without an outcome, ``reported_at_s`` is when it began to serve."""

    reported_at_s: float
    outcome: TickOutcome | None = None

    def watch(self, outcome: TickOutcome) -> None:
        self.outcome = outcome
        self.reported_at_s = outcome.reported_at_s


@dataclass(frozen=True)
class EngineSession:
    """Await ``until_end``, then ``end``. A second ``end`` does what is left of the first."""

    app: Any
    """The OpenAI application."""
    canary: CanaryWatch
    latest: LatestTick
    on_tick: tuple[OnTick, ...]
    hang_after_s: float | None
    calls_ended: Callable[[float], Any]
    """Waits at most so many seconds for the open calls of the API."""
    engine: _Engine
    lifespan: contextlib.AsyncExitStack
    """Of ``app``."""
    stalled: asyncio.Future[str]
    """What stalls, where the policy restarts the engine then."""
    ticking: asyncio.Task[None]

    @property
    def handle(self) -> EngineHandle:
        return self.engine.handle

    def is_alive(self) -> bool:
        return self.handle.is_alive()

    def queue(self) -> Queue:
        handle = self.handle
        return Queue(handle.reports, handle.waiting_calls, handle.room_for_calls)

    async def until_end(self) -> Died:
        """Returns once it has died, hangs, or stalls where the policy restarts then.

        Raises what ends the control loop otherwise: a mistake of the daemon.
        """
        ends: set[asyncio.Future[Any]] = {self.ticking, self.stalled}
        age = ReportAge(time.monotonic())
        while True:
            await asyncio.wait(ends, timeout=_LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
            if self.ticking.done():
                return _end_of(self.ticking)
            if self.stalled.done():
                return Died(self.stalled.result())
            if not self.is_alive():
                return Died("the engine core has died")
            age_s = age.since_report_s(time.monotonic(), self.latest.reported_at_s)
            if self.hang_after_s is not None and age_s > self.hang_after_s:
                return Died(
                    f"no report for {format_duration(round(age_s))}, longer than "
                    f"supervision.hang_after {format_duration(self.hang_after_s)}",
                    hangs=True,
                )

    async def end(self, *, kill: bool) -> list[str]:
        """Stop it and free what it held; how each of its processes ended, in words.

        ``kill``: it hangs, so it is not asked to stop first.
        """
        self.ticking.cancel()
        await asyncio.gather(self.ticking, return_exceptions=True)
        await self.canary.close()
        await self.calls_ended(_CUT_WITHIN_S)
        await self.lifespan.aclose()
        return await self.engine.stop(kill=kill)


def _end_of(ticking: asyncio.Task[None]) -> Died:
    error = ticking.exception()
    if isinstance(error, EngineGone):
        return Died(str(error))
    if error is not None:
        raise error
    raise RuntimeError("the control loop ended by itself")


# --- starting -------------------------------------------------------------------------


async def start_session(
    node: Node, values: EngineValues, number: int, stop: asyncio.Event
) -> EngineSession:
    """An engine that serves with ``values``, the daemon's ``number``-th.

    Raises whatever keeps it from starting, or ``StoppedWhileStarting`` after ``stop``; then nothing
    of it is left.
    """
    # vLLM freezes the heap that it finds, with the engine before in it.
    gc.unfreeze()
    gc.collect()
    engine = await _launch(node, values, node.folder / str(number), stop)
    try:
        return await _begin(node, values, engine)
    except BaseException:
        await engine.stop(kill=False)
        raise


async def _launch(node: Node, values: EngineValues, folder: Path, stop: asyncio.Event) -> _Engine:
    stop_s = engine_stop_s(values.config.host_budget)
    os.environ[_RPC_FOLDER_ENV] = str(folder)
    if node.sets_worker_stop:
        os.environ[WORKER_STOP_ENV] = str(int(stop_s))
    since = ProcessesSince()

    def launch() -> tuple[EngineHandle, Any]:
        from hisparsed.engine.launch import launch_engine, require_startable
        from hisparsed.engine.openai_app import frontend_arguments, preload

        folder.mkdir(parents=True, exist_ok=True)
        config, most = values.config, values.max_multiplier
        require_startable(config, node.kind, max_multiplier=most)
        frontend = frontend_arguments(config)
        handle = launch_engine(
            config, node.kind, max_multiplier=most, context_limit=node.context_limit
        )
        preload()
        return handle, frontend

    try:
        handle, frontend = await _beside_loop(
            launch, lambda begun: begun[0].shutdown(stop_s), stop, since.look
        )
    except BaseException as error:
        # Before the next start: it needs the memory that these still hold.
        processes = await asyncio.to_thread(_after_failed_start, since.look(), stop_s)
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, EngineStartError):
            raise _with_processes(error, processes) from error
        raise
    return _Engine(handle, frontend, await asyncio.to_thread(since.look), folder, stop_s)


def _after_failed_start(processes: EngineProcesses, stop_s: float) -> EngineProcesses:
    """Blocks until nothing is left of it."""
    processes.end_within(stop_s)
    processes.free()
    return processes


def _with_processes(error: EngineStartError, processes: EngineProcesses) -> EngineStartError:
    """vLLM does not say that its processes were killed."""
    exits = processes.exits()
    why = "; ".join(exits) if processes.killed else error.why
    return EngineStartError(why, processes=exits, killed=processes.killed)


async def _beside_loop(
    launch: Callable[[], tuple[EngineHandle, Any]],
    stop_engine: Callable[[tuple[EngineHandle, Any]], None],
    stop: asyncio.Event,
    look: Callable[[], object],
) -> tuple[EngineHandle, Any]:
    """What ``launch`` returns, called in a thread; ``look`` is called meanwhile, in others.

    Raises what ``launch`` raises, or ``StoppedWhileStarting`` once ``stop`` is set; then whatever
    was begun has ended, by ``stop_engine`` where the engine was up already.
    """
    stopping = asyncio.create_task(stop.wait())
    starting = asyncio.create_task(asyncio.to_thread(launch))
    ends: set[asyncio.Future[Any]] = {starting, stopping}
    while not starting.done() and not stopping.done():
        await asyncio.wait(ends, timeout=_LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.to_thread(look)
    if not stop.is_set():
        stopping.cancel()
        return starting.result()
    while not starting.done():
        # Again and again: the thread may be just about to begin a process.
        for child in multiprocessing.active_children():
            child.terminate()
        await asyncio.wait({starting}, timeout=_TERMINATE_EVERY_S)
    if starting.exception() is None:
        await asyncio.to_thread(stop_engine, starting.result())
    raise StoppedWhileStarting


async def _begin(node: Node, values: EngineValues, engine: _Engine) -> EngineSession:
    from hisparsed.engine.launch import served_names
    from hisparsed.engine.openai_app import build_openai_app

    plane, handle = node.plane, engine.handle
    app = await build_openai_app(
        handle.llm, engine.frontend, served_names=served_names(values.config, node.kind)
    )
    # vLLM's error handlers stop the server through this when they find the engine dead.
    app.state.server = SimpleNamespace(should_exit=False)
    async with contextlib.AsyncExitStack() as lifespan:
        await lifespan.enter_async_context(app.router.lifespan_context(app))
        loop = ControlLoop(
            handle,
            plane,
            set_admission=node.admission.put_limits,
            refused=node.admission.refused_by_limits,
        )
        canary = CanaryWatch(
            CanaryAsker(handle),
            plane.holds,
            plane.recorder,
            plane.journal,
            node.config.state_dir,
            clock=plane.clock,
            wall_clock=plane.wall_clock,
        )
        stalled: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def restart(why: str) -> None:
            if not stalled.done():
                stalled.set_result(why)

        stalls = StallWatchdog(
            plane.recorder,
            RestartFile(node.config.state_dir),
            wall_clock=plane.wall_clock,
            restart=restart,
        )
        await loop.start()
        latest = LatestTick(time.monotonic())
        return EngineSession(
            app=app,
            canary=canary,
            latest=latest,
            on_tick=(latest.watch, stalls.watch, canary.watch),
            hang_after_s=node.config.supervision.hang_after,
            calls_ended=node.admission.all_ended,
            engine=engine,
            lifespan=lifespan.pop_all(),
            stalled=stalled,
            ticking=asyncio.create_task(loop.run()),
        )
