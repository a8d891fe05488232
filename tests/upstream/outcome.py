"""How a reproduction ends: 1 where vLLM's fault shows, 0 where it does not, 2 where it broke."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def run(reproduce: Callable[[], str | None]) -> None:
    """Print what is wrong, or that nothing is, and exit."""
    only_errors()
    try:
        found = reproduce()
        from vllm import __version__
    except Exception:
        traceback.print_exc()
        sys.exit(2)
    sys.stdout.write(f"vLLM {__version__}: {found or 'the fault does not show.'}\n")
    sys.exit(1 if found else 0)


def only_errors() -> None:
    """vLLM's log has nothing less; call before vLLM is imported."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(logging.Formatter().format(record))


@contextmanager
def logged_errors(name: str) -> Iterator[list[str]]:
    """What the logger ``name`` says at ERROR and above, which goes nowhere else meanwhile."""
    logger, kept = logging.getLogger(name), _Kept()
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(kept)
    try:
        yield kept.lines
    finally:
        logger.removeHandler(kept)
        logger.propagate = propagates
