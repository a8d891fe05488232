"""Events, and the stream that carries them to listeners.

``EventRecorder`` writes an event to the journal, the event stream and the log in one call.
``Broadcast`` sends messages to every listener and waits for none of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hisparsed.control.journal.journal import Journal
from hisparsed.control.journal.records import EventRecord, view_event
from hisparsed.policy.events import EventKind, EventLevel
from hisparsed.policy.problems import printable

KEEPALIVE_S = 5.0
"""A listener without messages for much longer may take the daemon for dead."""
_BACKLOG = 64


@dataclass(frozen=True, slots=True)
class Message:
    """``kind`` is status, decisions or event; ``data`` is JSON text on one line."""

    kind: str
    data: str


class Broadcast:
    """A listener that falls behind by more than a backlog loses the oldest messages."""

    def __init__(self) -> None:
        self._listeners: set[asyncio.Queue[Message | None]] = set()
        self._closed = False

    @property
    def listeners(self) -> int:
        return len(self._listeners)

    def send(self, message: Message) -> None:
        self._put(message)

    def close(self) -> None:
        """End every stream, so that a stopping server does not wait for its listeners."""
        self._closed = True
        self._put(None)

    @contextmanager
    def listen(
        self, *, keepalive: Callable[[], Message] | None = None, keepalive_s: float = KEEPALIVE_S
    ) -> Iterator[AsyncIterator[Message]]:
        """Messages from now on, until ``close``; if none arrives for ``keepalive_s``, the message
        of ``keepalive``."""
        backlog: asyncio.Queue[Message | None] = asyncio.Queue(maxsize=_BACKLOG)
        if self._closed:
            backlog.put_nowait(None)
        self._listeners.add(backlog)
        try:
            yield _until_closed(backlog, keepalive, keepalive_s)
        finally:
            self._listeners.discard(backlog)

    def _put(self, message: Message | None) -> None:
        for backlog in self._listeners:
            if backlog.full():
                backlog.get_nowait()
            backlog.put_nowait(message)


async def _until_closed(
    backlog: asyncio.Queue[Message | None],
    keepalive: Callable[[], Message] | None,
    keepalive_s: float,
) -> AsyncIterator[Message]:
    while True:
        try:
            async with asyncio.timeout(keepalive_s if keepalive is not None else None):
                message = await backlog.get()
        except TimeoutError:
            if keepalive is not None:
                yield keepalive()
            continue
        if message is None:
            return
        yield message


log = logging.getLogger("hisparsed.control")

DAEMON = "daemon"
_LEVELS = {
    EventLevel.INFO: logging.INFO,
    EventLevel.WARNING: logging.WARNING,
    EventLevel.ERROR: logging.ERROR,
}


class EventRecorder:
    """``wall_clock`` is Unix seconds."""

    def __init__(
        self, journal: Journal, broadcast: Broadcast, *, wall_clock: Callable[[], float]
    ) -> None:
        self._journal = journal
        self._broadcast = broadcast
        self._wall_clock = wall_clock

    def event(self, kind: EventKind, sentence: str, *, actor: str = DAEMON) -> None:
        """``sentence`` is for people; several lines are allowed."""
        sentence, actor = printable(sentence), printable(actor)
        record = EventRecord(
            self._journal.next_sequence(), self._wall_clock(), kind, actor, sentence
        )
        self._journal.record(record)
        self._broadcast.send(Message("event", view_event(record).model_dump_json()))
        extra = {"event_id": kind.value, "actor": actor}
        log.log(_LEVELS[kind.level], "%s", sentence, extra=extra)
