"""Background tasks: an exception ends one try, not the task."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hisparsed.control.background import LONGEST_WAIT_S, Background
from hisparsed.policy.events import EventKind


class Waits:
    """Notes how long a task waits, and stops it after as many as are asked for."""

    def __init__(self, most: int) -> None:
        self.waited_s: list[float] = []
        self._most = most
        self.enough = asyncio.Event()

    async def __call__(self, seconds: float) -> None:
        self.waited_s.append(seconds)
        if len(self.waited_s) == self._most:
            self.enough.set()
            await asyncio.Event().wait()


def background(node: Any, waits: Waits) -> Background:
    return Background(node.recorder, clock=node.clock.monotonic, sleep=waits)


async def test_a_task_that_fails_begins_again_and_is_told(
    node: Any, caplog: pytest.LogCaptureFixture
) -> None:
    waits, tries = Waits(3), []

    async def work() -> None:
        tries.append(None)
        raise OverflowError("half of \ud800")

    tasks = background(node, waits)
    tasks.begin({"file watch": work})
    await asyncio.wait_for(waits.enough.wait(), 5)
    (status,) = tasks.status()
    assert (status.name, status.running, status.failures_total) == ("file watch", False, 3)
    assert (len(tries), waits.waited_s) == (3, [1.0, 2.0, 4.0])
    (event, *_) = node.journal.recent_events(3)
    assert event.kind is EventKind.TASK_FAILED
    assert "The file watch stopped (OverflowError: half of \\ud800)" in event.sentence
    assert "restarts in 4s" in event.sentence
    assert caplog.text.count("Traceback") == 3
    await tasks.end()


async def test_a_task_that_ends_by_itself_begins_again(node: Any) -> None:
    waits = Waits(1)

    async def work() -> None:
        return

    tasks = background(node, waits)
    tasks.begin({"file watch": work})
    await asyncio.wait_for(waits.enough.wait(), 5)
    assert "it ended unexpectedly" in node.journal.recent_events(1)[0].sentence
    await tasks.end()


async def test_one_that_went_on_for_long_waits_as_at_first(node: Any) -> None:
    waits, tries = Waits(3), []

    async def work() -> None:
        tries.append(None)
        if len(tries) == 3:
            node.clock.now_s += LONGEST_WAIT_S + 1
        raise OSError

    tasks = background(node, waits)
    tasks.begin({"file watch": work})
    await asyncio.wait_for(waits.enough.wait(), 5)
    assert waits.waited_s == [1.0, 2.0, 1.0]
    await tasks.end()


async def test_one_that_goes_on_is_shown_and_ends_with_the_node(node: Any) -> None:
    begun = asyncio.Event()
    other = asyncio.Event()

    async def work() -> None:
        begun.set()
        await asyncio.Event().wait()

    async def fails() -> None:
        other.set()
        raise ValueError

    tasks = background(node, Waits(1))
    tasks.begin({"file watch": work, "GPU watch": fails})
    await asyncio.wait_for(asyncio.gather(begun.wait(), other.wait()), 5)
    await asyncio.sleep(0)
    assert [(one.name, one.running) for one in tasks.status()] == [
        ("file watch", True),
        ("GPU watch", False),
    ]
    await tasks.end()


async def test_a_watcher_of_ticks_that_fails_keeps_no_other_from_the_tick(node: Any) -> None:
    seen: list[Any] = []

    def fails(_: Any) -> None:
        raise OverflowError("too far")

    await node.loop.start()
    node.on_tick[:0] = [fails]
    node.on_tick.append(seen.append)
    with pytest.raises(OverflowError, match="too far"):
        await node.loop.tick()
    assert len(seen) == 1
