"""Background tasks that run as long as the daemon: restarted when they end, and reported.

Not for engines, which ``supervision`` keeps, nor for work that has an end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from hisparsed.control.events import EventRecorder
from hisparsed.control.status.document import BackgroundStatus
from hisparsed.policy.events import EventKind
from hisparsed.policy.units import format_duration

log = logging.getLogger("hisparsed.control")

FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0

Work = Callable[[], Coroutine[Any, Any, None]]


class Background:
    """``clock`` is monotonic seconds. Use it inside a running event loop."""

    def __init__(
        self,
        recorder: EventRecorder,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._recorder = recorder
        self._clock = clock
        self._sleep = sleep
        self._tasks: list[asyncio.Task[None]] = []
        self._status: dict[str, BackgroundStatus] = {}

    def begin(self, works: Mapping[str, Work]) -> None:
        """Each by the name that operators see."""
        for name, work in works.items():
            self._status[name] = BackgroundStatus(name=name)
            self._tasks.append(asyncio.create_task(self._keep(name, work)))

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def status(self) -> list[BackgroundStatus]:
        return list(self._status.values())

    async def _keep(self, name: str, work: Work) -> None:
        wait_s = FIRST_WAIT_S
        while True:
            began_s = self._clock()
            try:
                await work()
                why = "it ended unexpectedly"
            except Exception as error:
                log.exception("The %s failed.", name)
                why = f"{type(error).__name__}: {error}"
            if self._clock() - began_s > LONGEST_WAIT_S:
                wait_s = FIRST_WAIT_S
            self._set(name, running=False, failures_total=self._status[name].failures_total + 1)
            self._recorder.event(
                EventKind.TASK_FAILED,
                f"The {name} stopped ({why}); it restarts in {format_duration(wait_s)}. This is a "
                f"bug in the daemon: please report it.",
            )
            await self._sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)
            self._set(name, running=True)

    def _set(self, name: str, **changes: Any) -> None:
        self._status[name] = self._status[name].model_copy(update=changes)
