"""The daemon's own log on standard error: text for people, JSON for journald and collectors.

Only ``hisparsed.*`` loggers; vLLM configures its own. What either says can also be watched.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import structlog

from hisparsed.config.node import LogConfig
from hisparsed.control.log_ring import LogRing, RingHandler
from hisparsed.engine.log_forward import EngineLogReceiver


def configure_logging(config: LogConfig, *, terminal: bool) -> None:
    """Install one handler for ``hisparsed``; safe to call again. ``terminal`` decides ``auto``."""
    text = config.format == "text" or (config.format == "auto" and terminal)
    renderer: Any = (
        structlog.dev.ConsoleRenderer(colors=terminal)
        if text
        else structlog.processors.JSONRenderer()
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[
                structlog.stdlib.add_log_level,
                structlog.stdlib.add_logger_name,
                structlog.processors.TimeStamper(fmt="iso", utc=True),
            ],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    logger = logging.getLogger("hisparsed")
    logger.handlers = [handler]
    logger.setLevel(config.level.upper())
    logger.propagate = False


@contextmanager
def watched_logs(ring: LogRing) -> Iterator[None]:
    """While in it, what daemon and engine log also goes into ``ring``."""
    handler = RingHandler(ring)
    loggers = [logging.getLogger(name) for name in ("hisparsed", "vllm")]
    engine = EngineLogReceiver(partial(ring.add, "engine"))
    engine.start()
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
        engine.close()
