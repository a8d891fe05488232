"""One engine from its launch to the end of its processes, with all that is made for it alone.

The OpenAI application, the control loop, the canary and the watchdog begin and end with it. The
launch blocks for seconds or minutes, so it runs in a thread and the daemon answers meanwhile. A
stop ends the processes that were begun, which makes vLLM give up at once. What comes after an end
is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from hisparsed.canary.watch import CanaryAsker, CanaryWatch
from hisparsed.config.machine import NodeKind
from hisparsed.control.status.current import TickOutcome
from hisparsed.engine.context_limit import ContextLimit
from hisparsed.engine.port import EngineGone
from hisparsed.node.control_plane import ControlParts
from hisparsed.node.engine.processes import EngineProcesses, children_now, processes_since
from hisparsed.node.engine.records import RestartFile
from hisparsed.node.engine.supervision import Died
from hisparsed.node.engine.values import EngineValues, engine_stop_s
from hisparsed.node.engine.watchdog import Silence, Standstill
from hisparsed.node.openai.admission import Gate
from hisparsed.node.openai.session_limit import Queue, SessionLimit
from hisparsed.policy.signals import Admission
from hisparsed.policy.units import format_duration

if TYPE_CHECKING:
    from hisparsed.control.loop import ControlLoop
    from hisparsed.engine.launch import EngineHandle


_TERMINATE_EVERY_S = 0.1


class StoppedWhileStarting(BaseException):
    """The node was told to stop before the engine served."""


async def start_beside_loop(
    launch: Callable[[], EngineHandle],
    stop_engine: Callable[[EngineHandle], None],
    stop: asyncio.Event,
) -> EngineHandle:
    """What ``launch`` returns, called in a thread.

    Raises what ``launch`` raises, or ``StoppedWhileStarting`` once ``stop`` is set; then whatever
    was begun has ended, by ``stop_engine`` where the engine was up already.
    """
    stopping = asyncio.create_task(stop.wait())
    starting = asyncio.create_task(asyncio.to_thread(launch))
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
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


_LOOK_EVERY_S = 0.2
_CUT_WITHIN_S = 2.0
"""Calls that were cut end at once; their clients may be slow to take the last word."""
_KILLED_WITHIN_S = 30.0
WORKER_STOP_ENV = "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"
"""vLLM gives its workers five seconds, in which no large pool is unpinned."""
_RPC_FOLDER_ENV = "VLLM_RPC_BASE_PATH"
"""Where vLLM's processes put the sockets between them. Only these go with each engine: what
libraries keep for temporary files may be wanted by the next one."""


@dataclass(frozen=True)
class Surroundings:
    """What engines come and go within."""

    parts: ControlParts
    gate: Gate
    context: ContextLimit
    kind: NodeKind
    folder: Path
    """For the files of engines while they live."""
    hang_after_s: float | None
    sets_worker_stop: bool
    """Whether vLLM's limit on the stop of its workers is ours to set."""


class EngineLife:
    """Call ``start``, then ``until_end``, then ``end``; one after the other, once each."""

    def __init__(self, values: EngineValues, around: Surroundings, number: int) -> None:
        self._values = values
        self._around = around
        self._stop_s = engine_stop_s(values.config.host_budget)
        self._folder = around.folder / str(number)
        self._children = children_now()
        self._watchers = list(around.parts.board.watchers)
        self._stalled: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._reported_at_s = time.monotonic()
        self._handle: EngineHandle | None = None
        self._frontend: Any = None
        self._processes = EngineProcesses((), (), frozenset())
        self._lifespan: AbstractAsyncContextManager[Any] | None = None
        self._canary: CanaryWatch | None = None
        self._ticking: asyncio.Task[None] | None = None
        self.app: Any = None
        """The OpenAI application, once started."""
        self.last: TickOutcome | None = None
        """Its latest tick."""

    def is_alive(self) -> bool:
        return self._handle is not None and self._handle.is_alive()

    # --- beginning --------------------------------------------------------------------

    async def start(self, stop: asyncio.Event) -> None:
        """Returns when it serves.

        Raises whatever keeps it from starting, or ``StoppedWhileStarting`` after ``stop``; then
        nothing of it is left.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        os.environ[_RPC_FOLDER_ENV] = str(self._folder)
        if self._around.sets_worker_stop:
            os.environ[WORKER_STOP_ENV] = str(int(self._stop_s))
        try:
            self._handle = await start_beside_loop(
                self._launch, lambda begun: begun.shutdown(self._stop_s), stop
            )
            self._processes = processes_since(self._children)
            await self._begin(self._handle)
        except BaseException:
            await self.end(kill=False)
            raise

    def _launch(self) -> EngineHandle:
        from hisparsed.engine.launch import launch_engine, require_startable
        from hisparsed.engine.openai_app import frontend_arguments, preload

        config, most = self._values.config, self._values.max_multiplier
        require_startable(config, self._around.kind, max_multiplier=most)
        self._frontend = frontend_arguments(config)
        handle = launch_engine(config, self._around.kind, max_multiplier=most)
        preload()
        return handle

    async def _begin(self, handle: EngineHandle) -> None:
        from hisparsed.engine.launch import served_names
        from hisparsed.engine.openai_app import build_openai_app

        around, parts = self._around, self._around.parts
        # The limit outlives engines, and so do its counts.
        handle.llm.context_limit = around.context
        around.context.chars_per_token = handle.llm.chars_per_token
        self.app = await build_openai_app(
            handle.llm,
            self._frontend,
            served_names=served_names(self._values.config, around.kind),
        )
        # vLLM's error handlers stop the server through this when they find the engine dead.
        self.app.state.server = SimpleNamespace(should_exit=False)
        lifespan = self.app.router.lifespan_context(self.app)
        await lifespan.__aenter__()
        self._lifespan = lifespan
        around.gate.door.queue = lambda: Queue(
            handle.reports, handle.waiting_calls, handle.room_for_calls
        )
        handle.refused_calls = lambda: around.gate.counters.refused_session + around.context.refused
        loop = parts.make_loop(handle, self._put_limits)
        parts.board.watchers += [self._look, self._standstill().watch]
        self._canary = parts.start_canary(CanaryAsker(handle))
        parts.views.requests = handle.requests
        await loop.start()
        self._reported_at_s = time.monotonic()
        self._ticking = self._tick(loop)

    def _tick(self, loop: ControlLoop) -> asyncio.Task[None]:
        return asyncio.create_task(loop.run())

    def _look(self, outcome: TickOutcome) -> None:
        self.last = outcome
        self._reported_at_s = outcome.reported_at_s

    def _standstill(self) -> Standstill:
        parts = self._around.parts

        def restart(why: str) -> None:
            if not self._stalled.done():
                self._stalled.set_result(why)

        return Standstill(
            parts.announcer, RestartFile(parts.state_dir), wall_clock=time.time, restart=restart
        )

    def _put_limits(self, admission: Admission) -> None:
        self._around.gate.door.limit = SessionLimit(
            max_waiting=admission.max_waiting_sessions,
            retry_after_s=admission.retry_after_s,
            when_full=admission.when_full,
            max_wait_s=admission.max_wait_s,
        )
        self._around.context.max_tokens = admission.max_context_tokens
        self._around.context.over = admission.over_max_context

    # --- living -----------------------------------------------------------------------

    async def until_end(self) -> Died:
        """Returns once it has died, hangs, or stands still where the policy restarts then.

        Raises what ends the control loop otherwise: a mistake of the daemon.
        """
        ticking, handle = self._ticking, self._handle
        if ticking is None or handle is None:
            raise RuntimeError("the engine was not started")
        ends: set[asyncio.Future[Any]] = {ticking, self._stalled}
        silence = Silence(time.monotonic())
        while True:
            await asyncio.wait(ends, timeout=_LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
            if ticking.done():
                return _end_of(ticking)
            if self._stalled.done():
                return Died(self._stalled.result())
            if not handle.is_alive():
                return Died("the engine core has died")
            silent_s = silence.since_report_s(time.monotonic(), self._reported_at_s)
            limit_s = self._around.hang_after_s
            if limit_s is not None and silent_s > limit_s:
                return Died(
                    f"no report for {format_duration(round(silent_s))}, longer than "
                    f"supervision.hang_after {format_duration(limit_s)}",
                    hangs=True,
                )

    # --- ending -----------------------------------------------------------------------

    async def end(self, *, kill: bool) -> list[str]:
        """Stop it and free what it held; how each of its processes ended, in words.

        ``kill``: it hangs, so it is not asked to stop first.
        """
        parts = self._around.parts
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.gather(self._ticking, return_exceptions=True)
        parts.board.watchers[:] = self._watchers
        parts.views.requests = None
        parts.canary_api.watch = None
        if self._canary is not None:
            await self._canary.close()
        await self._around.gate.all_ended(_CUT_WITHIN_S)
        if self._lifespan is not None:
            await self._lifespan.__aexit__(None, None, None)
        exits = await asyncio.to_thread(self._stop, kill)
        self._processes.free()
        self._forget()
        return exits

    def _stop(self, kill: bool) -> list[str]:
        """Blocks. Only what does not come to an end is killed: its way out may unpin memory."""
        if kill:
            self._processes.kill()
        if self._handle is not None:
            self._handle.shutdown(self._stop_s)
        if not self._processes.wait(self._stop_s):
            kill = True
            self._processes.kill()
            self._processes.wait(_KILLED_WITHIN_S)
        return self._processes.exits(killed=kill)

    def _forget(self) -> None:
        self._handle = self.app = self._lifespan = self._canary = self._ticking = None
        shutil.rmtree(self._folder, ignore_errors=True)
        # vLLM freezes the heap that it finds, with the engine before in it.
        gc.unfreeze()
        gc.collect()


def _end_of(ticking: asyncio.Task[None]) -> Died:
    error = ticking.exception()
    if isinstance(error, EngineGone):
        return Died(str(error))
    if error is not None:
        raise error
    raise RuntimeError("the control loop ended by itself")


LifeFactory = Callable[[EngineValues, int], EngineLife]
