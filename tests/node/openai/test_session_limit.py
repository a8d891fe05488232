"""Held calls: in order of arrival, as reports show room, and none is lost on the way."""

from __future__ import annotations

import asyncio
from itertools import count

from hisparsed.node.openai.session_limit import Entry, Queue, SessionLimit, SessionLimiter


class Limiter(SessionLimiter):
    """Looks only when the test does; ``report`` is what the engine says next."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._serials = count()
        self.report(waiting=1)
        super().__init__(
            clock=lambda: self.now_s, queue=lambda: self.reported, look_every_s=3_600.0
        )
        self.limit = SessionLimit(max_waiting=1, when_full="wait", max_wait_s=60.0)

    def report(self, *, waiting: int) -> None:
        self.reported = Queue(next(self._serials), waiting, room=0)


def ends(entries: list[asyncio.Future[Entry]]) -> list[Entry | None]:
    return [entry.result() if entry.done() else None for entry in entries]


async def test_calls_start_one_by_one_in_order_of_arrival_and_the_others_stay_held() -> None:
    limiter = Limiter()
    entries = [limiter.enter([mark])[1] for mark in (b"1", b"2", b"3")]
    limiter.look()
    assert (limiter.held, ends(entries)) == (3, [None] * 3)
    for started in (1, 2, 3):
        limiter.report(waiting=0)
        limiter.look()
        limiter.look()  # the same report says nothing new
        assert ends(entries) == [Entry.ADMITTED] * started + [None] * (3 - started)
        assert limiter.held == 3 - started
    limiter.close()


async def test_a_session_that_has_started_passes_those_that_are_held() -> None:
    limiter = Limiter()
    _, held = limiter.enter([b"1"])
    limiter.report(waiting=0)
    limiter.look()
    limiter.report(waiting=1)
    _, other = limiter.enter([b"2"])
    _, known = limiter.enter([b"1"])
    assert ends([held, known, other]) == [Entry.ADMITTED, Entry.ADMITTED, None]
    limiter.close()
    assert ends([other]) == [Entry.CLOSED]


async def test_each_is_refused_by_its_own_time() -> None:
    limiter = Limiter()
    _, first = limiter.enter([b"1"])
    limiter.now_s = 59.0
    _, second = limiter.enter([b"2"])
    for now_s, expected in ((59.9, [None, None]), (60.0, [Entry.REFUSED, None])):
        limiter.now_s = now_s
        limiter.look()
        assert ends([first, second]) == expected
    limiter.now_s = 119.0
    limiter.look()
    assert ends([first, second]) == [Entry.REFUSED, Entry.REFUSED]
    assert limiter.held == 0
