"""The GPUs of a CUDA node in its status and its events, for as long as the daemon lives."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator

from hisparsed.config.kind import NodeKind
from hisparsed.control.announce import Announcer
from hisparsed.control.board import Board
from hisparsed.control.gpu_events import GpuEvents
from hisparsed.engine.cuda.gpu_watch import EVERY_S, GpuWatch
from hisparsed.engine.cuda.nvml import GpuReader, nvidia_library


@contextlib.contextmanager
def watched_gpus(kind: NodeKind, board: Board) -> Iterator[None]:
    """Inside, ``board`` shows what NVML tells. Other kinds of node have no GPUs to show."""
    if kind != "cuda":
        yield
        return
    reader = GpuReader(nvidia_library(), os.environ)
    watch = GpuWatch(reader.read, clock=time.monotonic, close=reader.close)
    board.gpus = watch.status
    watch.start()
    try:
        yield
    finally:
        watch.stop()


async def tell_of_gpus(board: Board, announcer: Announcer, *, every_s: float = EVERY_S) -> None:
    """Until cancelled, also while no engine runs: a lost GPU is what ends one."""
    events = GpuEvents()
    while True:
        seen = board.gpus() if board.gpus is not None else None
        for kind, sentence in events.news(seen, time.monotonic()):
            announcer.event(kind, sentence)
        await asyncio.sleep(every_s)
