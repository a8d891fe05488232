"""A broken host ledger as people meet it: frozen levers, an event, and a thaw that is checked."""

from __future__ import annotations

from typing import Any

from prometheus_client import generate_latest

from hisparsed.control.engine_port import EngineGone
from hisparsed.control.records import EventKind
from hisparsed.control.status_text import status_page
from hisparsed.engine.messages import LedgerViolation
from hisparsed.policy.reasons import Lever, Reason

BROKEN = {
    "violations": [LedgerViolation(rule="one-tenant", sentence="host block 7 is lent twice")],
    "violations_total": 1,
}


async def kinds(node: Any) -> list[EventKind]:
    return [event.kind for event in await node.journal.events(20)][::-1]


async def broken(node: Any) -> None:
    await node.loop.start()
    node.engine.target = 10
    node.engine.changes = dict(BROKEN)
    await node.ticks(1)


async def test_a_violation_freezes_every_lever_in_the_same_tick(node: Any) -> None:
    await broken(node)
    decision = node.journal.ticks[-1].decision
    assert decision.of(Lever.SPLIT).reason is Reason.FROZEN
    assert len(node.engine.commands) == 1, "only the start"
    assert node.overrides.frozen == set(Lever)


async def test_it_is_told_once_with_rule_and_figures(node: Any) -> None:
    await broken(node)
    await node.ticks(3)
    assert await kinds(node) == [EventKind.STARTED, EventKind.LEDGER_VIOLATION]
    event = (await node.journal.events(1))[0]
    assert "one-tenant: host block 7 is lent twice" in event.sentence
    assert "BROKEN   host ledger, levers frozen: one-tenant" in status_page(node.board.status())
    assert b"hisparsed_ledger_violations_total 1.0" in generate_latest(node.metrics.registry)


async def test_another_violation_is_told_again(node: Any) -> None:
    await broken(node)
    node.engine.changes["violations_total"] = 2
    await node.ticks(1)
    assert (await kinds(node)).count(EventKind.LEDGER_VIOLATION) == 2


async def test_thawing_lets_the_engine_check_everything(node: Any) -> None:
    await broken(node)
    node.operator.thaw([Lever.SPLIT], actor="ada")
    await node.ticks(1)
    assert node.engine.commands[1].clear_violations
    node.engine.changes = {}
    await node.ticks(1)
    assert (await kinds(node))[-2:] == [EventKind.THAWED, EventKind.LEDGER_SOUND]
    assert node.overrides.frozen == set(Lever) - {Lever.SPLIT}
    assert node.engine.target > 10, "the thawed lever moves again"


async def test_a_ledger_that_is_still_broken_freezes_again(node: Any) -> None:
    await broken(node)
    node.operator.thaw(list(Lever), actor="ada")
    node.engine.apply_trouble.append(ValueError("levers are frozen: the host ledger broke x"))
    await node.ticks(1)
    assert node.overrides.frozen == set(Lever)
    event = (await node.journal.events(1))[0]
    assert event.kind is EventKind.LEDGER_VIOLATION
    assert "frozen again: levers are frozen: the host ledger broke x" in event.sentence
    await node.ticks(2)
    assert len(node.engine.commands) == 2, "it is not asked again before somebody thaws"


async def test_an_engine_that_dies_during_the_check_ends_the_loop(node: Any) -> None:
    await broken(node)
    node.operator.thaw(list(Lever), actor="ada")
    node.engine.apply_trouble.append(EngineGone("gone"))
    try:
        await node.ticks(1)
    except EngineGone:
        return
    raise AssertionError("the end of the engine must not be hidden")
