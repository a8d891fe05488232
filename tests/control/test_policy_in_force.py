"""The journal keeps the policy whenever it changes, and the terminal view reads it back."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from typing import Any

from hisparsed.control.journal.store import FILE_NAME
from hisparsed.policy.schema import Mode
from hisparsed.policy.signals import Lever
from hisparsed.tui.journal_reader import JournalReader


def kept(node: Any) -> list[dict[str, Any]]:
    """The policies in the file, once it is written."""
    node.journal.close()
    with closing(sqlite3.connect(node.folder / "state" / FILE_NAME)) as database:
        rows = database.execute("SELECT document FROM policies ORDER BY id").fetchall()
    return [json.loads(text) for (text,) in rows]


async def test_the_policy_is_kept_once_and_at_each_change(node: Any) -> None:
    node.journal.start()
    await node.loop.start()
    await node.ticks(3)
    node.operator.set_value("hot.max", 3, for_s=2.0, actor="ann")
    await node.ticks(4)
    node.operator.set_mode([Lever.SPLIT], Mode.ADVISE, actor="ann")
    await node.ticks(2)
    found = kept(node)
    assert [one["values"]["hot.max"] for one in found] == ["auto", "3", "auto", "auto"]
    assert [one["values"]["levers.split.mode"] for one in found] == ["null"] * 3 + ["advise"]
    assert found[1]["sources"]["hot.max"]["actor"] == "ann"
    assert all("document" not in one for one in found)


async def test_a_reader_finds_the_policy_of_a_time(node: Any) -> None:
    node.journal.start()
    await node.loop.start()
    await node.ticks(3)
    changed_s = node.clock.wall()
    node.operator.set_value("hot.max", 3, for_s=None, actor="ann")
    await node.ticks(3)
    node.journal.close()
    reader = JournalReader(node.folder / "state" / FILE_NAME)
    try:
        values = [
            found[1]["values"]["hot.max"]
            for at_s in (changed_s - 0.5, changed_s + 0.5)
            if (found := reader.policy_at(at_s)) is not None
        ]
        assert values == ["auto", "3"]
        assert reader.policy_at(changed_s - 1_000) is None
    finally:
        reader.close()
