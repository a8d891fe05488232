"""The loop: what it applies, what it survives, what it reports, and when it ticks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hisparsed.control.text.status import status_page
from hisparsed.engine.port import EngineGone
from hisparsed.errors import UserError
from hisparsed.policy.decisions import Reason
from hisparsed.policy.keys import PendingRestart
from hisparsed.policy.signals import AdmissionOrder, LeasePoint, Lever, RequestHot, Reserve


def last_reasons(node: Any) -> dict[Lever, Reason]:
    return {one.lever: one.reason for one in node.journal.ticks[-1].decision.levers}


async def test_start_puts_the_policys_start_in_force(node: Any) -> None:
    await node.loop.start()
    (command,) = node.engine.commands
    assert command.offload_target_blocks == 100
    assert command.multiplier == 2.0
    assert [one.max_running for one in node.admissions] == [8]
    (event,) = await node.journal.events(10)
    assert "100 of 1000 host blocks" in event.sentence


async def test_a_node_whose_policy_is_off_still_starts_with_an_offload_pool(
    make_node: Callable[[str], Any],
) -> None:
    node = make_node("version: 1\nmode: off\n")
    await node.loop.start()
    (command,) = node.engine.commands
    assert command.offload_target_blocks > 0
    assert command.multiplier is None
    assert command.admission is None
    await node.ticks(3)
    assert len(node.engine.commands) == 1
    assert set(last_reasons(node).values()) == {Reason.OFF}


async def test_a_policy_that_the_node_cannot_keep_stops_the_start(
    make_node: Callable[[str], Any],
) -> None:
    node = make_node("version: 1\nhot: {min: 8, max: 9, start: 8}\n")
    with pytest.raises(UserError, match=r"policy\.yaml:2: hot\.min is 8\.0"):
        await node.loop.start()
    assert node.engine.commands == []


async def test_a_short_offload_pool_is_put_right_and_confirmed(node: Any) -> None:
    await node.loop.start()
    node.engine.target = 10
    await node.ticks(2)
    first, second = node.journal.ticks
    split = first.decision.of(Lever.SPLIT)
    assert split.reason is Reason.OFFLOAD_SHORT_OF_REACH
    assert node.engine.target == int(split.wanted) > 10
    assert first.applied is not None
    assert first.applied.bounded == ()
    assert first.sentence == split.sentence
    assert second.confirmed is not None
    assert second.confirmed.tick == 1
    assert second.confirmed.differences == ()


async def test_a_bounded_target_is_recorded_and_said(
    node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await node.loop.start()
    node.engine.target = 10
    apply = node.engine.apply

    async def bounded_apply(command: Any) -> Any:
        lower = replace(command, offload_target_blocks=17)
        return await apply(lower)

    monkeypatch.setattr(node.engine, "apply", bounded_apply)
    await node.ticks(1)
    record = node.journal.ticks[-1]
    (difference,) = record.applied.bounded
    assert (difference.lever, difference.found) == (Lever.SPLIT, 17)
    assert difference.wanted > 17
    assert "The engine bounded it to 17." in record.sentence


async def test_a_target_that_did_not_stay_is_told(node: Any) -> None:
    await node.loop.start()
    node.engine.target = 10
    await node.ticks(1)
    asked = node.engine.target
    node.engine.target = 33
    await node.ticks(1)
    record = node.journal.ticks[-1]
    (difference,) = record.confirmed.differences
    assert (difference.wanted, difference.found) == (asked, 33)
    assert "did not take effect" in record.sentence


async def test_advise_applies_nothing_and_says_what_it_would_do(
    make_node: Callable[[str], Any],
) -> None:
    node = make_node("version: 1\nmode: advise\n")
    await node.loop.start()
    node.engine.commands.clear()
    node.engine.target = 20
    await node.ticks(2)
    assert node.engine.commands == []
    split = node.journal.ticks[-1].decision.of(Lever.SPLIT)
    assert split.reason is Reason.ADVISE_ONLY
    assert split.cause is Reason.OFFLOAD_SHORT_OF_REACH


async def test_frozen_levers_stay_until_thawed(node: Any) -> None:
    await node.loop.start()
    node.operator.freeze([Lever.SPLIT], actor="ann")
    node.engine.target = 10
    await node.ticks(3)
    assert node.engine.target == 10
    assert last_reasons(node)[Lever.SPLIT] is Reason.FROZEN
    node.operator.thaw([Lever.SPLIT], actor="ann")
    await node.ticks(1)
    assert node.engine.target > 10


async def test_admission_reaches_the_engine_and_the_api_side(
    make_node: Callable[[str], Any],
) -> None:
    node = make_node(
        "version: 1\nadmission: {max_waiting_sessions: 3, retry_after: 7s, max_running: 4}\n"
    )
    await node.loop.start()
    node.engine.live_set_tokens = 10**9
    await node.ticks(1)
    assert node.engine.order == "held-prefix-first"
    assert node.engine.max_running == 4
    limits = node.admissions[-1]
    assert limits.order is AdmissionOrder.HELD_PREFIX_FIRST
    assert (limits.max_waiting_sessions, limits.retry_after_s) == (3, 7.0)
    await node.ticks(1)
    assert last_reasons(node)[Lever.ADMISSION] is Reason.AT_TARGET


async def test_a_failed_report_is_counted_and_later_stale(node: Any) -> None:
    await node.loop.start()
    await node.ticks(1)
    node.engine.report_trouble = [TimeoutError("no answer")] * 7
    await node.ticks(7)
    assert node.current.counters.failed_reports == 7
    assert set(last_reasons(node).values()) == {Reason.STALE}
    assert "reported" in (node.current.unready() or "")
    await node.ticks(1)
    assert Reason.STALE not in last_reasons(node).values()
    assert node.current.unready() is None
    kinds = [event.kind for event in await node.journal.events(10)]
    assert kinds == ["report-back", "report-failed", "started"]


async def test_a_refused_command_is_counted_and_tried_again(node: Any) -> None:
    await node.loop.start()
    node.engine.target = 10
    node.engine.apply_trouble = [ValueError("not now")]
    await node.ticks(1)
    record = node.journal.ticks[-1]
    assert record.applied.error == "not now"
    assert "It failed: not now." in record.sentence
    assert node.current.counters.failed_applies == 1
    await node.ticks(3)
    assert node.engine.target > 10


async def test_a_dead_engine_ends_the_loop(node: Any) -> None:
    await node.loop.start()
    node.engine.report_trouble = [EngineGone("killed by signal 9")]
    with pytest.raises(EngineGone, match="killed by signal 9"):
        await node.loop.run()


async def test_a_mistake_in_deciding_does_not_end_the_node(
    node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await node.loop.start()

    def mistake(*_: Any) -> Any:
        raise ZeroDivisionError("no capacity")

    monkeypatch.setattr("hisparsed.control.loop.decide", mistake)
    commands = len(node.engine.commands)
    await run_for(node, 3, [])
    assert node.current.counters.failed_ticks == 3
    assert len(node.engine.commands) == commands
    kinds = [event.kind for event in node.current.status().events]
    assert kinds == ["tick-failed", "started"]
    monkeypatch.undo()
    await node.ticks(1)
    assert len(node.journal.ticks) == 1


async def test_an_engine_that_dies_at_once_ends_the_start(node: Any) -> None:
    node.engine.report_trouble = [EngineGone("out of memory")]
    with pytest.raises(EngineGone, match="out of memory"):
        await node.loop.start()


async def test_a_sentence_only_when_something_changed(node: Any) -> None:
    await node.loop.start()
    await node.ticks(7)
    sentences = [record.sentence for record in node.journal.ticks]
    assert sentences[0] is not None
    assert sentences[-1] is None


class EnoughError(Exception):
    """Ends a loop that would continue."""


async def run_for(node: Any, sleeps: int, seconds_a_report: list[float]) -> list[float]:
    """Run until this many sleeps; every report takes the next of ``seconds_a_report``."""

    def slow() -> None:
        node.clock.now_s += seconds_a_report.pop(0) if seconds_a_report else 0.0

    def count() -> None:
        if len(node.clock.slept) == sleeps:
            raise EnoughError

    node.engine.before_report = slow
    node.clock.after_sleep = count
    with pytest.raises(EnoughError):
        await node.loop.run()
    return list(node.clock.slept)


async def test_ticks_do_not_drift(node: Any) -> None:
    await node.loop.start()
    began = node.clock.now_s
    slept = await run_for(node, 4, [0.25, 0.5, 0.125, 0.0])
    assert slept == [0.75, 0.5, 0.875, 1.0]
    assert node.clock.now_s == began + 4
    assert node.current.counters.late_ticks == 0


async def test_a_slow_engine_leaves_ticks_out_instead_of_piling_them_up(node: Any) -> None:
    await node.loop.start()
    began = node.clock.now_s
    slept = await run_for(node, 3, [3.25, 0.0, 0.0])
    assert slept == [0.75, 1.0, 1.0]
    assert node.clock.now_s == began + 6
    assert node.current.counters.late_ticks == 3
    assert len(node.journal.ticks) == 3


async def test_cancelling_ends_the_loop(node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    await node.loop.start()
    asleep = asyncio.Event()

    async def sleep_for_ever(seconds: float) -> None:
        asleep.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(node.loop, "_sleep", sleep_for_ever)
    task = asyncio.create_task(node.loop.run())
    await asleep.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(node.journal.ticks) == 1


async def test_a_reloaded_policy_counts_from_the_next_tick(node: Any) -> None:
    await node.loop.start()
    await node.ticks(1)
    node.policy_path.write_text("version: 1\nmode: off\n")
    node.operator.reload(actor="SIGHUP")
    await node.ticks(1)
    record = node.journal.ticks[-1]
    assert record.decision.policy_generation == 2
    assert set(last_reasons(node).values()) == {Reason.OFF}


async def test_a_reserve_is_put_in_force_and_its_memory_released_when_the_policy_says(
    node: Any,
) -> None:
    await node.loop.start()
    await node.ticks(2)
    document = node.policy_path.read_text()
    reserve = "pools:\n  reserve: 5%\n  release_reserve: true\n"
    node.policy_path.write_text(document.replace("pools:\n", reserve))
    node.operator.reload(actor="ann")
    await node.ticks(2)
    command = node.engine.commands[-1]
    assert (command.reserve_target_blocks, command.release_reserve) == (50, True)
    assert (node.engine.reserve, node.engine.releasing) == (50, True)
    confirmed = node.journal.ticks[-1].confirmed
    assert confirmed is not None
    assert confirmed.differences == ()
    assert node.journal.ticks[-1].snapshot.reserve == Reserve(50, 50, True, True)
    await node.ticks(3)
    assert node.engine.commands[-1] is command, "nothing is sent twice"


async def test_leases_of_their_own_reach_the_engine_and_end_with_the_policy(node: Any) -> None:
    def hot(blocks: int, misses: tuple[float, float, float]) -> RequestHot:
        curve = tuple(LeasePoint(*point) for point in zip((4, 8, 12), misses, strict=True))
        return RequestHot(f"r{misses[0]:g}", blocks, blocks, curve)

    await node.loop.start()
    report = await node.engine.report()
    unequal = (hot(8, (90.0, 40.0, 5.0)), hot(8, (3.0, 1.0, 1.0)))
    node.engine.changes = {
        "requests_hot": unequal,
        "requests": replace(report.requests, waiting=0),
    }
    shared = node.policy_path.read_text() + "hot: {sharing: marginal-gain, window_shrink: 1s}\n"
    node.policy_path.write_text(shared)
    node.operator.reload(actor="ann")
    await node.ticks(3)
    leases = [one.hot_leases for one in node.engine.commands if one.hot_leases is not None]
    assert leases[0] == {"r90": 10, "r3": 6}
    node.engine.changes["hot"] = replace(report.hot, individual_leases=2)
    node.policy_path.write_text(shared.replace("marginal-gain", "even"))
    node.operator.reload(actor="ann")
    await node.ticks(2)
    assert node.engine.commands[-1].hot_leases == {}


MORE = "hot: {min: 1, max: 3, start: 2}\n"


@pytest.fixture
async def fixed(make_node: Callable[[str], Any], policy_text: str) -> Any:
    """Leases of 16 blocks, 4x, while the policy allows 3x at most."""
    node = make_node(policy_text + MORE)
    report = await node.engine.report()
    node.engine.changes["geometry"] = replace(report.geometry, hot_live=False)
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
    status = fixed.current.status()
    assert [one.pending_restart for one in status.levers if one.lever is Lever.MULTIPLIER] == [True]
    assert status.policy.pending_restart == [PendingRestart("hot.start", "4", "2")]
    assert "NEEDS RESTART" in status_page(status)


async def test_an_engine_started_with_the_policys_start_waits_for_nothing(
    make_node: Callable[[str], Any], policy_text: str
) -> None:
    node = make_node(policy_text + "hot: {min: 1, max: 8, start: 4}\n")
    report = await node.engine.report()
    node.engine.changes["geometry"] = replace(report.geometry, hot_live=False)
    await node.loop.start()
    await node.ticks(2)
    assert node.source.pending_restart() == (), "hot.max above it would change nothing here"
    one = node.journal.ticks[-1].decision.of(Lever.MULTIPLIER)
    assert one.reason is not Reason.PENDING_RESTART


async def test_where_copies_are_not_proved_nothing_is_lent(
    make_node: Callable[[str], Any], policy_text: str
) -> None:
    node = make_node(policy_text)
    report = await node.engine.report()
    node.engine.changes["geometry"] = replace(report.geometry, lends=False)
    node.engine.target = 0
    await node.loop.start()
    await node.ticks(3)
    assert all(not one.offload_target_blocks for one in node.engine.commands)
    one = node.journal.ticks[-1].decision.of(Lever.SPLIT)
    assert one.reason is Reason.UNPROVED
    assert Lever.SPLIT not in node.journal.ticks[-1].snapshot.live_levers


async def test_other_levers_move_as_on_any_node(fixed: Any) -> None:
    fixed.engine.target = 10
    await fixed.ticks(4)
    moved = [one.offload_target_blocks for one in fixed.engine.commands[1:]]
    assert any(moved)
