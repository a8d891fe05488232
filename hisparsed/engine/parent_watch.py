"""Ends a child process when its parent is gone, however the parent ended.

vLLM stops its engine core when told to; a daemon that was killed can no longer tell it, and the
engine would keep its memory for ever. Not for clean stops: those go through vLLM.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from multiprocessing.connection import wait

EXIT_PARENT_GONE = 71
_THREAD_NAME = "hisparsed-parent-watch"


def end_with_parent() -> None:
    """From now on this process ends at once when its parent has; safe to call again.

    Does nothing in a process that multiprocessing did not start.
    """
    parent = multiprocessing.parent_process()
    if parent is None or any(one.name == _THREAD_NAME for one in threading.enumerate()):
        return
    threading.Thread(
        target=_wait_and_end, args=(parent.sentinel,), name=_THREAD_NAME, daemon=True
    ).start()


def _wait_and_end(sentinel: int) -> None:
    wait([sentinel])
    with contextlib.suppress(OSError):
        os.write(2, b"hisparsed: the daemon is gone; its engine process ends.\n")
    # Not sys.exit: from a thread that ends only the thread, and there is nobody left to answer.
    os._exit(EXIT_PARENT_GONE)
