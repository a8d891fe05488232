"""Starts one engine: launch, application, control loop, canary and watchdog.

``start_session`` returns it complete, or raises and leaves nothing. The launch blocks for seconds
or minutes, so it runs in a thread and the daemon answers meanwhile. A stop ends the processes that
were begun, which makes vLLM give up at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from hisparsed.canary.asker import CanaryAsker
from hisparsed.canary.watch import CanaryWatch
from hisparsed.control.loop import ControlLoop
from hisparsed.engine.garbage import collect_as_usual, collect_rarely
from hisparsed.errors import EngineStartError
from hisparsed.node.engine.kernels import Settled
from hisparsed.node.engine.processes import EngineProcesses, ProcessesSince
from hisparsed.node.engine.records import RestartFile
from hisparsed.node.engine.session import EngineSession, LatestTick, RunningEngine
from hisparsed.node.engine.shared_memory import SharedMemoryRecord
from hisparsed.node.engine.values import EngineValues, engine_stop_s
from hisparsed.node.engine.watchdog import StallWatchdog
from hisparsed.node.node import WORKER_STOP_ENV, Node
from hisparsed.node.openai.background import RESPONSES_API, BackgroundResponses
from hisparsed.node.openai.server import only_served

if TYPE_CHECKING:
    from hisparsed.engine.launch import EngineHandle


class StoppedWhileStarting(BaseException):
    """The node was asked to stop before the engine served."""


_RPC_FOLDER_ENV = "VLLM_RPC_BASE_PATH"
"""Where vLLM's processes put the sockets between them. Only these are removed with each engine: the
next one may want the temporary files of libraries."""
_TERMINATE_EVERY_S = 0.1
_LOOK_EVERY_S = 0.2


async def start_session(
    node: Node, values: EngineValues, number: int, stop: asyncio.Event
) -> EngineSession:
    """An engine that serves with ``values``, the daemon's ``number``-th.

    Raises the error that prevents its start, or ``StoppedWhileStarting`` after ``stop``; then
    nothing of it is left.
    """
    # vLLM freezes the present heap, which holds the previous engine.
    gc.unfreeze()
    gc.collect()
    settled = await _settle(node, values, stop)
    engine = await _launch(node, settled, node.folder / str(number), stop)
    try:
        return await while_it_lives(
            _begin(node, settled.values, engine), engine.handle.is_alive, stop
        )
    except BaseException as error:
        await engine.stop(kill=False)
        if isinstance(error, EngineStartError):
            raise _with_processes(error, engine.processes) from error
        raise


async def while_it_lives(
    beginning: Coroutine[Any, Any, EngineSession], is_alive: Callable[[], bool], stop: asyncio.Event
) -> EngineSession:
    """The result of ``beginning``. vLLM's own calls in it wait without a limit for an engine that
    has died.

    Raises ``EngineStartError`` if it has died, and ``StoppedWhileStarting`` once ``stop`` is set.
    """
    begun = asyncio.create_task(beginning)
    stopping = asyncio.create_task(stop.wait())
    try:
        ends: set[asyncio.Future[Any]] = {begun, stopping}
        while not begun.done() and not stopping.done() and is_alive():
            await asyncio.wait(ends, timeout=_LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
        if stopping.done() and not begun.done():
            raise StoppedWhileStarting
        error = begun.exception() if begun.done() else None
        if not is_alive() and (error is not None or not begun.done()):
            raise EngineStartError("the engine core ended before it served") from error
        return begun.result()
    finally:
        stopping.cancel()
        begun.cancel()
        await asyncio.gather(begun, return_exceptions=True)


async def _settle(node: Node, values: EngineValues, stop: asyncio.Event) -> Settled:
    """Chooses its kernels. Raises ``StoppedWhileStarting`` once ``stop`` is set."""
    if node.kernels is None:
        return Settled(values)
    stopping = asyncio.create_task(stop.wait())
    settling = asyncio.create_task(node.kernels.settle(values))
    await asyncio.wait({settling, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if settling.done():
        return settling.result()
    settling.cancel()
    await asyncio.gather(settling, return_exceptions=True)
    raise StoppedWhileStarting


async def _launch(node: Node, settled: Settled, folder: Path, stop: asyncio.Event) -> RunningEngine:
    values = settled.values
    stop_s = engine_stop_s(values.config)
    os.environ[_RPC_FOLDER_ENV] = str(folder)
    if node.sets_worker_stop:
        os.environ[WORKER_STOP_ENV] = str(int(stop_s))
    since = ProcessesSince(SharedMemoryRecord(node.config.state_dir).add)

    def launch() -> tuple[EngineHandle, Any]:
        from hisparsed.engine.launch import launch_engine, require_startable
        from hisparsed.engine.openai_app import frontend_arguments, preload

        collect_rarely()
        folder.mkdir(parents=True, exist_ok=True)
        config, most = values.config, values.max_multiplier
        require_startable(config, node.kind, max_multiplier=most)
        frontend = frontend_arguments(config, node.kind)
        if stop.is_set():  # an import of vLLM cannot be cancelled, but nothing starts after it
            raise StoppedWhileStarting
        handle = launch_engine(
            config,
            node.kind,
            max_multiplier=most,
            context_limit=node.context_limit,
            lends=settled.lends,
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
    finally:
        collect_as_usual()
    return RunningEngine(handle, frontend, await asyncio.to_thread(since.look), folder, stop_s)


def _after_failed_start(processes: EngineProcesses, stop_s: float) -> EngineProcesses:
    """Blocks until no process of it is left."""
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
    """Calls ``launch`` in a thread and returns its result; ``look`` is called meanwhile, in other
    threads.

    Raises what ``launch`` raises, or ``StoppedWhileStarting`` once ``stop`` is set; then all
    started processes have ended, with ``stop_engine`` if the engine was up already.
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
        # Repeatedly, because the thread may be about to start a process.
        for child in multiprocessing.active_children():
            child.terminate()
        await asyncio.wait({starting}, timeout=_TERMINATE_EVERY_S)
    if starting.exception() is None:
        await asyncio.to_thread(stop_engine, starting.result())
    raise StoppedWhileStarting


async def _begin(node: Node, values: EngineValues, engine: RunningEngine) -> EngineSession:
    from hisparsed.engine.launch import served_names
    from hisparsed.engine.openai_app import build_openai_app

    plane, handle = node.plane, engine.handle
    app = await build_openai_app(
        handle.llm, engine.frontend, served_names=served_names(values.config, node.kind)
    )
    whole = app.openapi
    app.openapi = lambda: only_served(whole())
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
            exact=node.kind == "reference",
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
            background=BackgroundResponses(getattr(app.state, RESPONSES_API, None)),
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
