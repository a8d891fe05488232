"""Starts the engine beside the event loop, so that the control socket answers meanwhile.

vLLM's start blocks for tens of seconds, or minutes with real weights. It runs in a thread here;
told to stop, the processes that it began are ended, which makes vLLM give up at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hisparsed.engine.handle import EngineHandle

_LOOK_EVERY_S = 0.1


class StoppedWhileStarting(BaseException):
    """SIGTERM or SIGINT came before the node served."""


async def start_beside_loop(
    launch: Callable[[], EngineHandle], stop_engine: Callable[[EngineHandle], None]
) -> EngineHandle:
    """What ``launch`` returns, called in a thread.

    Raises what ``launch`` raises, or ``StoppedWhileStarting`` after a signal; then whatever
    was begun has ended, by ``stop_engine`` where the engine was up already.
    """
    with _signalled() as stop:
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


@contextlib.contextmanager
def _signalled() -> Iterator[asyncio.Event]:
    """Set by SIGTERM and SIGINT; the handlers from before are back afterwards."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    numbers = (signal.SIGTERM, signal.SIGINT)
    previous = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, previous[number])
