"""Trouble as events: a broken host ledger, and GPUs that are lost or slow."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client import generate_latest

from hisparsed.control.journal.store import FILE_NAME
from hisparsed.control.text.status import status_page
from hisparsed.control.watch import FREE_S, HELD_S, GpuEvents, StateWatch
from hisparsed.engine.cuda.nvml import GpuCard, GpusStatus
from hisparsed.engine.port import EngineGone
from hisparsed.policy.decisions import Reason
from hisparsed.policy.events import EventKind
from hisparsed.policy.signals import Ledger, LedgerViolation, Lever

FOUND = (LedgerViolation(rule="one-tenant", sentence="host block 7 is lent twice"),)
BROKEN = {"ledger": Ledger(FOUND, violations_total=1)}


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
    assert node.holds.frozen == set(Lever)


async def test_it_is_told_once_with_rule_and_figures(node: Any) -> None:
    await broken(node)
    await node.ticks(3)
    assert await kinds(node) == [EventKind.STARTED, EventKind.LEDGER_VIOLATION]
    event = (await node.journal.events(1))[0]
    assert "one-tenant: host block 7 is lent twice" in event.sentence
    assert "BROKEN   host ledger, levers frozen: one-tenant" in status_page(node.current.status())
    assert b"hisparsed_ledger_violations_total 1.0" in generate_latest(node.metrics.registry)


async def test_another_violation_is_told_again(node: Any) -> None:
    await broken(node)
    node.engine.changes["ledger"] = Ledger(FOUND, violations_total=2)
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
    assert node.holds.frozen == set(Lever) - {Lever.SPLIT}
    assert node.engine.target > 10, "the thawed lever moves again"


async def test_a_ledger_that_is_still_broken_freezes_again(node: Any) -> None:
    await broken(node)
    node.operator.thaw(list(Lever), actor="ada")
    node.engine.apply_trouble.append(ValueError("levers are frozen: the host ledger broke x"))
    await node.ticks(1)
    assert node.holds.frozen == set(Lever)
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


def card(index: int = 0, *, lost: bool = False, slowed_by: list[str] | None = None) -> GpuCard:
    return GpuCard(
        index=index,
        name="H200",
        uuid=f"GPU-{index}",
        memory_used_bytes=None,
        memory_total_bytes=None,
        utilization=None,
        pcie_rx_bytes_per_s=None,
        pcie_tx_bytes_per_s=None,
        slowed_by=slowed_by,
        lost=lost,
    )


class Seen:
    """Kinds of the events that readings give, one reading after the other."""

    def __init__(self) -> None:
        self.events = GpuEvents()
        self.sentences: list[str] = []

    def __call__(self, now_s: float, *cards: GpuCard) -> list[str]:
        found = list(self.events.changes(GpusStatus(age_s=0, cards=list(cards)), now_s))
        self.sentences += [sentence for _, sentence in found]
        return [kind.value for kind, _ in found]


def slow(seen: Seen, now_s: float, *reasons: str) -> list[str]:
    return seen(now_s, card(slowed_by=list(reasons)))


def test_gpus_that_are_well_are_no_event() -> None:
    seen = Seen()
    assert [seen(now_s, card(0), card(1, slowed_by=[])) for now_s in (0, 1, 100)] == [[], [], []]


def test_nothing_is_told_before_the_first_reading() -> None:
    assert list(GpuEvents().changes(None, 0.0)) == []


def test_a_lost_gpu_is_told_once_with_its_name_and_once_when_it_is_back() -> None:
    seen = Seen()
    assert seen(0, card(0), card(1, lost=True)) == ["gpu-lost"]
    assert seen(1, card(0), card(1, lost=True)) == []
    assert seen(2, card(0), card(1)) == ["gpu-back"]
    assert seen(3, card(0), card(1, lost=True)) == ["gpu-lost"]
    assert seen.sentences[0].startswith("GPU 1 (H200, GPU-1) is lost")


def test_clocks_held_down_are_told_once_they_have_been_for_long() -> None:
    seen = Seen()
    assert slow(seen, 0, "thermal-hardware") == []
    assert slow(seen, HELD_S - 1, "thermal-hardware") == []
    assert slow(seen, HELD_S, "power-brake", "thermal-hardware") == ["gpu-throttled"]
    assert slow(seen, HELD_S + 1, "thermal-hardware") == []
    assert "power-brake, thermal-hardware" in seen.sentences[0]


def test_a_moment_of_heat_is_no_event() -> None:
    seen = Seen()
    slow(seen, 0, "thermal-software")
    slow(seen, HELD_S - 1)
    assert slow(seen, HELD_S + 5, "thermal-software") == []


def test_a_gpu_at_its_power_cap_is_none_either() -> None:
    seen = Seen()
    slow(seen, 0, "power-cap")
    assert slow(seen, 10 * HELD_S, "power-cap") == []


def test_full_speed_is_told_once_it_lasts() -> None:
    seen = Seen()
    slow(seen, 0, "power-brake")
    assert slow(seen, 20, "power-brake") == ["gpu-throttled"]
    assert slow(seen, 21) == []
    assert slow(seen, 30, "power-brake") == []
    assert slow(seen, 31) == []
    assert slow(seen, 30 + FREE_S, "power-cap") == []
    assert slow(seen, 31 + FREE_S) == ["gpu-full-speed"]


@pytest.mark.parametrize("reading", [card(lost=True), card(slowed_by=None)], ids=["lost", "unread"])
def test_what_cannot_be_read_is_not_full_speed(reading: GpuCard) -> None:
    seen = Seen()
    slow(seen, 0, "power-brake")
    slow(seen, 20, "power-brake")
    for now_s in (21, 21 + 2 * FREE_S):
        assert EventKind.GPU_FULL_SPEED.value not in seen(now_s, reading)


def test_each_gpu_has_its_own_time() -> None:
    seen = Seen()
    heat = ["thermal-hardware"]
    seen(0, card(0, slowed_by=heat), card(1, slowed_by=[]))
    seen(5, card(0, slowed_by=heat), card(1, slowed_by=heat))
    assert seen(10, card(0, slowed_by=heat), card(1, slowed_by=heat)) == ["gpu-throttled"]
    assert seen.sentences[0].startswith("GPU 0 ")


async def test_a_journal_that_was_taken_away_is_an_event(node: Any) -> None:
    node.journal.start()
    watch = StateWatch(node.journal, node.recorder, {})
    node.on_tick.append(watch.watch)
    await node.loop.start()
    await node.ticks(1)
    await written(node, 3)  # the start, the policy, the tick
    (node.folder / "state" / FILE_NAME).unlink()
    await node.ticks(1)
    await written(node, 4)
    await node.ticks(2)
    node.journal.close()
    found = [event for event in await node.journal.events(20) if event.kind == "journal-lost"]
    assert len(found) == 1
    assert "was removed or replaced while in use" in found[0].sentence


async def written(node: Any, count: int) -> None:
    """Until the journal's thread has written this many records."""
    for _ in range(1_000):
        if node.journal.health.written >= count:
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"{node.journal.health} after 5 s")
