"""Output for the service manager: systemd's notify protocol, and the log on standard error.

One datagram per message, best effort: without a service manager, or with a broken one, nothing
happens. A finished tick with a new report of the engine notifies the watchdog, never a timer, so it
notices a daemon whose loop or engine hangs. The log is text for people and JSON for journald and
collectors. The daemon, vLLM and the engine use one format; each process writes its own lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from functools import partial
from logging.config import dictConfig
from pathlib import Path

from hisparsed.config.node import LogConfig
from hisparsed.logs.process import (
    CONFIG_ENV,
    FORMAT_ENV,
    EngineLogReceiver,
    logging_document,
    process_handler,
    write_logging_document,
)
from hisparsed.logs.ring import LogRing, RingHandler

log = logging.getLogger("hisparsed.daemon")

Send = Callable[[bytes], None]

EXTEND_EVERY_S = 10.0
EXTEND_BY_S = 40.0
"""Each message asks for this many seconds from now on; four times the period, so that one may be
lost."""
_FEEDS_A_WATCHDOG = 4
"""Ticks are every second; this many notifications per watchdog interval are enough."""


class ServiceManager:
    """``send`` delivers one message; ``clock`` is monotonic seconds.

    ``watchdog_s`` is how long the manager waits for a sign of life, ``None`` where it does not.
    """

    def __init__(self, send: Send, *, watchdog_s: float | None, clock: Callable[[], float]) -> None:
        self._send = send
        self._watchdog_s = watchdog_s
        self._clock = clock
        self._fed_at_s: float | None = None
        self._longer_watchdog = False
        self._seen_report_s: float | None = None

    @property
    def watchdog_s(self) -> float | None:
        return self._watchdog_s

    def status(self, sentence: str) -> None:
        """What ``systemctl status`` shows."""
        self._tell(STATUS=sentence)

    def ready(self, sentence: str) -> None:
        """It serves, for the first time or again; the watchdog has its normal interval from now
        on."""
        self._tell(READY="1", STATUS=sentence)
        if self._longer_watchdog and self._watchdog_s is not None:
            self._longer_watchdog = False
            self._tell(WATCHDOG_USEC=_usec(self._watchdog_s))

    def restarting(self, sentence: str, *, within_s: float) -> None:
        """The engine is restarted; no tick notifies the watchdog until ``ready``."""
        self._tell(STATUS=sentence)
        self._lengthen_watchdog(within_s)

    def stopping(self, sentence: str, *, within_s: float) -> None:
        """``within_s`` limits the time until the end, in which no tick notifies the watchdog."""
        self._tell(STOPPING="1", STATUS=sentence)
        self._lengthen_watchdog(within_s)

    def _lengthen_watchdog(self, within_s: float) -> None:
        if self._watchdog_s is not None:
            self._longer_watchdog = True
            self._tell(WATCHDOG_USEC=_usec(max(self._watchdog_s, within_s)))

    @contextlib.contextmanager
    def reloading(self) -> Iterator[None]:
        """From reading the policy to the first decision with it."""
        self._tell(RELOADING="1", MONOTONIC_USEC=_usec(self._clock()))
        try:
            yield
        finally:
            self._tell(READY="1")

    def feed(self, reported_at_s: float) -> None:
        """A tick has ended; ``reported_at_s`` is when the engine gave the report it used.

        A second tick with the same report does not notify: loop and engine must both work.
        """
        if self._watchdog_s is None or reported_at_s == self._seen_report_s:
            return
        self._seen_report_s = reported_at_s
        now_s = self._clock()
        period_s = self._watchdog_s / _FEEDS_A_WATCHDOG
        if self._fed_at_s is None or now_s - self._fed_at_s >= period_s:
            self._fed_at_s = now_s
            self._tell(WATCHDOG="1")

    @contextlib.asynccontextmanager
    async def busy(self, sentence: str, *, at_most_s: float) -> AsyncIterator[None]:
        """Ask for more time inside the block, up to ``at_most_s``; systemd ends a process that
        hangs longer."""
        extending = asyncio.create_task(self._extend(sentence, at_most_s))
        try:
            yield
        finally:
            extending.cancel()
            await asyncio.gather(extending, return_exceptions=True)

    async def _extend(self, sentence: str, at_most_s: float) -> None:
        began_s = self._clock()
        while (spent_s := self._clock() - began_s) < at_most_s:
            self._tell(
                EXTEND_TIMEOUT_USEC=_usec(EXTEND_BY_S),
                STATUS=f"{sentence} ({spent_s:.0f}s of at most {at_most_s:.0f}s)",
            )
            await asyncio.sleep(EXTEND_EVERY_S)
        log.warning("%s took more than %.0fs; not asking for more time.", sentence, at_most_s)

    def _tell(self, **fields: str) -> None:
        lines = [f"{name}={value}" for name, value in fields.items()]
        try:
            self._send("\n".join(lines).encode("utf-8", "backslashreplace"))
        except OSError as error:
            log.debug("The service manager cannot be notified of %s: %s", lines[0], error)


def service_manager(
    environment: MutableMapping[str, str], *, pid: int, clock: Callable[[], float]
) -> ServiceManager:
    """The manager that ``environment`` names; one that hears nothing where it names none.

    Removes the variables, so that no process of the engine sends messages as the daemon.
    """
    address = environment.pop("NOTIFY_SOCKET", "")
    watchdog_usec = environment.pop("WATCHDOG_USEC", "")
    watchdog_pid = environment.pop("WATCHDOG_PID", "")
    if not address:
        return ServiceManager(lambda _: None, watchdog_s=None, clock=clock)
    mine = watchdog_pid in ("", str(pid)) and watchdog_usec.isdigit()
    watchdog_s = int(watchdog_usec) / 1e6 if mine and int(watchdog_usec) else None
    # A leading @ is systemd's way to write an abstract address.
    target = "\0" + address[1:] if address.startswith("@") else address

    def send(message: bytes) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as out:
            out.sendto(message, target)

    return ServiceManager(send, watchdog_s=watchdog_s, clock=clock)


def _usec(seconds: float) -> str:
    return str(int(seconds * 1e6))


def configure_logging(config: LogConfig, *, terminal: bool) -> None:
    """Set this process's logging up, and that of the engine's. ``terminal`` decides ``auto``."""
    text = config.format == "text" or (config.format == "auto" and terminal)
    os.environ[FORMAT_ENV] = "text" if text else "json"
    logging.captureWarnings(True)
    dictConfig(logging_document(config.level.upper()))


@contextmanager
def watched_logs(ring: LogRing) -> Iterator[None]:
    """Inside the block, log lines of daemon and engine also go into ``ring``.

    vLLM is imported and its processes start inside it, so their logging is set up.
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
