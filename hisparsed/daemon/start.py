"""Starts the engine beside the event loop, so that the daemon answers meanwhile.

vLLM's start blocks for tens of seconds, or minutes with real weights. It runs in a thread here;
told to stop, the processes that it began are ended, which makes vLLM give up at once.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hisparsed.engine.handle import EngineHandle

_LOOK_EVERY_S = 0.1


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
        await asyncio.wait({starting}, timeout=_LOOK_EVERY_S)
    if starting.exception() is None:
        await asyncio.to_thread(stop_engine, starting.result())
    raise StoppedWhileStarting
