"""Which end of a node comes of what, without a node."""

from __future__ import annotations

import asyncio
from typing import Any

from hisparsed.daemon.node import RunningNode
from hisparsed.daemon.standstill import EXIT_STALLED


async def test_a_node_that_ends_itself_for_a_stall_drains_nothing_and_says_so() -> None:
    unused: Any = None
    node = RunningNode(unused, unused, unused, unused)
    ticking: asyncio.Task[None] = asyncio.create_task(asyncio.Event().wait())  # type: ignore[arg-type]
    node._stalled.set()
    assert await node._until_stopped(unused, ticking, []) == EXIT_STALLED
    ticking.cancel()
