"""The node's log on standard error: text for people, JSON for journald and collectors.

One form for the daemon's lines, vLLM's and the engine's; each process writes its own. What they
say can also be watched.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from logging.config import dictConfig
from pathlib import Path

from hisparsed.config.node import LogConfig
from hisparsed.control.log_ring import LogRing, RingHandler
from hisparsed.engine.log_forward import EngineLogReceiver
from hisparsed.engine.log_setup import (
    CONFIG_ENV,
    FORMAT_ENV,
    logging_document,
    process_handler,
    write_logging_document,
)


def configure_logging(config: LogConfig, *, terminal: bool) -> None:
    """Set this process's logging up, and that of the engine's. ``terminal`` decides ``auto``."""
    text = config.format == "text" or (config.format == "auto" and terminal)
    os.environ[FORMAT_ENV] = "text" if text else "json"
    logging.captureWarnings(True)
    dictConfig(logging_document(config.level.upper()))


@contextmanager
def watched_logs(ring: LogRing) -> Iterator[None]:
    """While in it, what daemon and engine log also goes into ``ring``.

    vLLM is imported, and its processes are started, in it: they find their logging set up.
    """
    handler = RingHandler(ring)
    others = process_handler().others
    engine = EngineLogReceiver(partial(ring.add, "engine"))
    engine.start()
    level = logging.getLevelName(logging.getLogger("hisparsed").level)
    with tempfile.TemporaryDirectory(prefix="hisparsed-logging-") as folder:
        os.environ[CONFIG_ENV] = str(write_logging_document(Path(folder), level))
        others.append(handler)
        try:
            yield
        finally:
            others.remove(handler)
            os.environ.pop(CONFIG_ENV)
            engine.close()
