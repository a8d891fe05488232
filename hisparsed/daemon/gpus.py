"""The GPUs of a CUDA node in its status, for as long as the daemon lives."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from hisparsed.config.kind import NodeKind
from hisparsed.control.board import Board
from hisparsed.engine.cuda.gpu_watch import GpuWatch
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
