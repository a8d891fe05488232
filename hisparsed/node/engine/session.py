"""One engine that serves, with the parts made for it alone, until its processes have ended.

The OpenAI application, the control loop, the canary and the watchdog begin and end with it.
``start`` starts it; the supervision decides what follows its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hisparsed.canary.watch import CanaryWatch
from hisparsed.control.status.current import OnTick, TickOutcome
from hisparsed.engine.port import EngineGone
from hisparsed.node.engine.processes import EngineProcesses
from hisparsed.node.engine.supervision import Died
from hisparsed.node.engine.watchdog import ReportAge
from hisparsed.node.openai.background import BackgroundResponses
from hisparsed.node.openai.session_limit import Queue
from hisparsed.policy.units import format_duration

if TYPE_CHECKING:
    from hisparsed.engine.launch import EngineHandle


_LOOK_EVERY_S = 0.2
_CUT_WITHIN_S = 2.0
"""Calls that were cut end at once, but their clients may be slow to read the last message."""


@dataclass(frozen=True)
class RunningEngine:
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
        """Blocks. Only processes that do not end are killed, because their exit may unpin
        memory."""
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
    """Await ``until_end``, then ``end``. A second ``end`` continues the first."""

    app: Any
    """The OpenAI application."""
    background: BackgroundResponses
    """Calls of ``app`` that continue after their first answer."""
    canary: CanaryWatch
    latest: LatestTick
    on_tick: tuple[OnTick, ...]
    hang_after_s: float | None
    calls_ended: Callable[[float], Any]
    """Waits at most this many seconds for the open calls of the API."""
    engine: RunningEngine
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

        Raises any other error that ends the control loop: a bug in the daemon.
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
            age_s = age.since_report_s(
                time.monotonic(), self.latest.reported_at_s, self.engine.processes.compile
            )
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
    raise RuntimeError("the control loop ended unexpectedly")
