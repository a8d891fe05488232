"""Python's garbage collector while a process imports vLLM.

Objects that imports create stay, so that repeated collections find nothing. With torch and vLLM
they take a sixth of the CPU time of the imports, in the daemon and in each engine process.
"""

from __future__ import annotations

import gc
import sys

_WHILE_IMPORTING = (100_000, 50, 100)
_usual = gc.get_threshold()


def collect_rarely() -> None:
    """Rarely, until ``collect_as_usual``; imports nothing, so that it can be called first."""
    gc.set_threshold(*_WHILE_IMPORTING)


def collect_as_usual() -> None:
    """As before ``collect_rarely``; does nothing if that was not called."""
    if gc.get_threshold() == _WHILE_IMPORTING:
        gc.set_threshold(*_usual)


def is_spawned() -> bool:
    """Whether multiprocessing began this process."""
    return sys.orig_argv[-1:] == ["--multiprocessing-fork"]
