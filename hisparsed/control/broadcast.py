"""Tells every listener of the event stream what happens, without waiting for any of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

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
    def listen(self, *, silence_s: float | None = None) -> Iterator[AsyncIterator[Message | None]]:
        """Messages from now on, until ``close``; ``None`` after each ``silence_s`` without one."""
        backlog: asyncio.Queue[Message | None] = asyncio.Queue(maxsize=_BACKLOG)
        if self._closed:
            backlog.put_nowait(None)
        self._listeners.add(backlog)
        try:
            yield _until_closed(backlog, silence_s)
        finally:
            self._listeners.discard(backlog)

    def _put(self, message: Message | None) -> None:
        for backlog in self._listeners:
            if backlog.full():
                backlog.get_nowait()
            backlog.put_nowait(message)


async def _until_closed(
    backlog: asyncio.Queue[Message | None], silence_s: float | None
) -> AsyncIterator[Message | None]:
    while True:
        try:
            async with asyncio.timeout(silence_s):
                message = await backlog.get()
        except TimeoutError:
            yield None
            continue
        if message is None:
            return
        yield message
