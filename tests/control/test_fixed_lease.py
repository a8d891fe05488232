"""A node whose kernels know one hot lease: the multiplier waits for a restart, and all say so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hisparsed.control.status_text import status_page
from hisparsed.policy.reasons import Lever, Reason
from hisparsed.policy.restart import PendingRestart

MORE = "hot: {min: 1, max: 3, start: 2}\n"


@pytest.fixture
async def fixed(make_node: Callable[[str], Any], policy_text: str) -> Any:
    """Leases of 16 blocks, 4x, while the policy allows 3x at most."""
    node = make_node(policy_text + MORE)
    report = await node.engine.report()
    node.engine.changes["geometry"] = report.geometry.model_copy(update={"hot_live": False})
    await node.loop.start()
    return node


async def test_the_start_leaves_the_multiplier_to_the_engine(fixed: Any) -> None:
    (command,) = fixed.engine.commands
    assert command.multiplier is None
    assert command.offload_target_blocks == 100, "other levers are put in force"


async def test_what_the_policy_wants_is_told_and_never_sent(fixed: Any) -> None:
    await fixed.ticks(3)
    one = fixed.journal.ticks[-1].decision.of(Lever.MULTIPLIER)
    assert one.reason is Reason.PENDING_RESTART
    assert (one.current, one.wanted) == (4.0, 3.0)
    assert one.sentence.startswith("Needs a restart: lease 3x instead of 4x")
    assert all(command.multiplier is None for command in fixed.engine.commands)


async def test_status_shows_lever_and_key(fixed: Any) -> None:
    await fixed.ticks(1)
    status = fixed.board.status()
    assert [one.pending_restart for one in status.levers if one.lever is Lever.MULTIPLIER] == [True]
    assert status.policy.pending_restart == [PendingRestart("hot.start", "4", "2")]
    assert "NEEDS RESTART" in status_page(status)


async def test_an_engine_started_with_the_policys_start_waits_for_nothing(
    make_node: Callable[[str], Any], policy_text: str
) -> None:
    node = make_node(policy_text + "hot: {min: 1, max: 8, start: 4}\n")
    report = await node.engine.report()
    node.engine.changes["geometry"] = report.geometry.model_copy(update={"hot_live": False})
    await node.loop.start()
    await node.ticks(2)
    assert node.source.pending_restart() == (), "hot.max above it would change nothing here"
    one = node.journal.ticks[-1].decision.of(Lever.MULTIPLIER)
    assert one.reason is not Reason.PENDING_RESTART


async def test_other_levers_move_as_on_any_node(fixed: Any) -> None:
    fixed.engine.target = 10
    await fixed.ticks(4)
    moved = [one.offload_target_blocks for one in fixed.engine.commands[1:]]
    assert any(moved)
