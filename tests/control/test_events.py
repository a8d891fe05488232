"""Events in the log, and the stream to listeners that may be slow or gone."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from hisparsed.control.events import Broadcast, EventRecorder, Message
from hisparsed.logs.format import formatter
from hisparsed.policy.events import EventKind
from hisparsed.policy.signals import Lever


async def test_the_stream_tells_status_decisions_and_events(node: Any) -> None:
    await node.loop.start()
    frames = node.api._stream()
    first = await anext(frames)
    assert first.startswith("event: status\ndata: {")
    node.engine.target = 10
    await node.ticks(1)
    node.operator.freeze([Lever.SPLIT], actor="ann")
    decisions, status, event = [await anext(frames) for _ in range(3)]
    assert decisions.startswith("event: decisions\n")
    views = json.loads(decisions.split("data: ")[1])
    assert any(view["code"] == "OffloadShortOfReach" for view in views)
    assert status.startswith("event: status\n")
    assert '"kind":"frozen"' in event
    assert all(frame.endswith("\n\n") and frame.count("\n") == 3 for frame in (status, event))
    node.broadcast.close()
    with pytest.raises(StopAsyncIteration):
        await anext(frames)
    assert node.broadcast.listeners == 0


async def test_a_slow_listener_loses_the_oldest_messages(node: Any) -> None:
    await node.loop.start()
    with node.broadcast.listen() as messages:
        await node.ticks(200)
        node.broadcast.close()
        seen = [message async for message in messages]
    assert 0 < len(seen) <= 64
    assert json.loads(seen[-1].data)["loop"]["tick"] == 200


async def test_a_stream_after_the_end_is_over_at_once(node: Any) -> None:
    node.broadcast.close()
    frames = [frame async for frame in node.api._stream()]
    assert len(frames) == 1


async def test_a_node_without_ticks_is_heard_from_all_the_same(node: Any) -> None:
    """An engine that starts for minutes must not look like a daemon that hangs."""
    with node.broadcast.listen(keepalive=node.api._status, keepalive_s=0.001) as messages:
        said = [await anext(messages) for _ in range(2)]
        assert [one.kind for one in said] == ["status", "status"]
        node.broadcast.send(Message("event", "{}"))
        while (await anext(messages)).kind != "event":
            pass
        node.broadcast.close()
        assert "event" not in [one.kind async for one in messages]


def test_an_event_is_logged_with_its_kind_and_actor(
    node: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    recorder = EventRecorder(node.journal, Broadcast(), wall_clock=node.clock.wall)
    recorder.event(EventKind.CANARY_MISMATCH, "Another answer came.", actor="ann")
    record = caplog.records[-1]
    shown = json.loads(formatter("json").format(record))
    assert (shown["event_id"], shown["actor"]) == ("canary-mismatch", "ann")
    assert (shown["level"], record.levelno) == ("error", logging.ERROR)
