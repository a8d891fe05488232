"""Modes, freezes, stale reports and restarts overrule every lever."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from pydantic import TypeAdapter

from hisparsed.policy.bounds import start_command
from hisparsed.policy.decide import decide
from hisparsed.policy.decisions import Decision, EngineCommand, Reason
from hisparsed.policy.memory import Memory
from hisparsed.policy.schema import Policy
from hisparsed.policy.signals import AdmissionOrder, Lever, Snapshot, Watermark

CAUSES = {
    Lever.SPLIT: Reason.OFFLOAD_SHORT_OF_REACH,
    Lever.MULTIPLIER: Reason.OUTSIDE_BOUNDS,
    Lever.ADMISSION: Reason.COVERAGE_LOW,
    Lever.WATERMARK: Reason.POLICY_VALUE,
}


def policy(**sections: Any) -> Policy:
    return Policy.model_validate({"version": 1, "watermark": {"value": 77}, **sections})


@pytest.fixture
def pressed(kit) -> Snapshot:
    """A node on which every lever wants to act."""
    return kit.change(
        kit.idle_snapshot(lent=300),
        hot__multiplier=5.0,
        sessions__live_set_tokens=10**9,
        sessions__live_sessions=9,
    )


def test_every_lever_acts(pressed) -> None:
    decision, _ = decide(policy(), pressed, Memory())
    assert [one.lever for one in decision.levers] == list(Lever)
    assert {one.lever: one.reason for one in decision.levers} == CAUSES
    assert decision.commands.offload_target_blocks == 657
    assert decision.commands.hisparse_target_blocks == 9_343
    assert decision.commands.multiplier == 4.0
    assert decision.commands.watermark == 77
    assert decision.commands.admission is not None
    assert decision.commands


@pytest.mark.parametrize("lever", list(Lever))
def test_off_leaves_one_lever_alone(pressed, lever: Lever) -> None:
    decision, _ = decide(policy(levers={lever.value: {"mode": "off"}}), pressed, Memory())
    off = decision.of(lever)
    assert (off.reason, off.wanted) == (Reason.OFF, off.current)
    assert all(one.acts for one in decision.levers if one.lever is not lever)


def test_off_everywhere(pressed) -> None:
    decision, _ = decide(policy(mode="off"), pressed, Memory())
    assert {one.reason for one in decision.levers} == {Reason.OFF}
    assert not decision.commands


def test_advise_says_the_same_and_commands_nothing(pressed) -> None:
    acting, _ = decide(policy(), pressed, Memory())
    advising, memory = decide(policy(mode="advise"), pressed, Memory())
    for act, advise in zip(acting.levers, advising.levers, strict=True):
        assert advise.reason is Reason.ADVISE_ONLY
        assert (advise.cause, advise.wanted) == (act.reason, act.wanted)
        assert advise.figures == act.figures
    assert advising.commands == EngineCommand()
    assert memory.split.last_at_s is None, "advice is not a move"


def test_holding_is_the_same_in_advise(kit) -> None:
    decision, _ = decide(policy(mode="advise"), kit.idle_snapshot(), Memory())
    assert decision.of(Lever.SPLIT).reason is Reason.IN_DEAD_BAND


@pytest.mark.parametrize("lever", list(Lever))
def test_frozen(kit, pressed, lever: Lever) -> None:
    frozen = kit.change(pressed, frozen_levers=frozenset({lever}))
    decision, _ = decide(policy(), frozen, Memory())
    one = decision.of(lever)
    assert (one.reason, one.cause) == (Reason.FROZEN, CAUSES[lever])
    assert sum(not other.acts for other in decision.levers) == 1


@pytest.mark.parametrize("lever", list(Lever))
def test_what_cannot_change_live_is_pending_restart(kit, pressed, lever: Lever) -> None:
    fixed = kit.change(pressed, live_levers=frozenset(Lever) - {lever})
    decision, _ = decide(policy(), fixed, Memory())
    one = decision.of(lever)
    assert (one.reason, one.cause) == (Reason.PENDING_RESTART, CAUSES[lever])
    assert one.wanted != one.current
    held, _ = decide(
        Policy(version=1), kit.change(kit.idle_snapshot(), live_levers=frozenset()), Memory()
    )
    assert held.of(lever).reason is not Reason.PENDING_RESTART


@pytest.mark.parametrize(("age_s", "stale"), [(5.0, False), (5.01, True)])
def test_a_stale_report_moves_nothing_and_leaves_no_trace(
    kit, pressed, age_s: float, stale: bool
) -> None:
    decision, memory = decide(policy(), kit.change(pressed, report_age_s=age_s), Memory())
    assert all((one.reason is Reason.STALE) is stale for one in decision.levers)
    assert bool(decision.commands) is not stale
    assert (memory == Memory()) is stale


def test_nothing_is_lent_where_copies_are_not_proved(kit, pressed) -> None:
    snapshot = kit.change(pressed, geometry__lends=False)
    decision, _ = decide(policy(), snapshot, Memory())
    split = decision.of(Lever.SPLIT)
    assert (split.reason, split.wanted) == (Reason.UNPROVED, split.current)
    assert "not proved" in split.sentence
    assert decision.commands.offload_target_blocks is None
    assert decision.commands.multiplier is not None, "other levers act"
    start = start_command(policy(), snapshot.geometry)
    assert (start.offload_target_blocks, start.reserve_target_blocks) == (None, None)


def test_a_restarted_engine_clears_what_was_observed_and_a_clock_set_back_the_moves_too(
    kit,
) -> None:
    snapshots = kit.held_for(kit.idle_snapshot(lent=300), 30, tokens__prompt_total=10)
    memory = Memory()
    for snapshot in snapshots:
        _, memory = decide(policy(), snapshot, memory)
    assert memory.split.last_at_s is not None
    for changes, keeps_moves in (
        ({"at_s": 1.0}, False),
        ({"tokens__prompt_total": 0}, True),
        ({"tokens__prompt_total": 10**6, "requests__finished_total": -1}, True),
    ):
        _, fresh = decide(policy(mode="advise"), kit.change(snapshots[-1], **changes), memory)
        assert (fresh.split.last_at_s is not None) is keeps_moves
        assert fresh.signals.split_in_use_blocks.observed_s == 0.0


def test_a_clock_that_jumps_ahead_starts_the_windows_anew(kit) -> None:
    memory = Memory()
    for snapshot in kit.held_for(kit.idle_snapshot(), 90):
        _, memory = decide(policy(), snapshot, memory)
    assert memory.signals.split_tokens_total.full(60.0)
    later = kit.change(snapshot, at_s=snapshot.at_s + 5.1)
    _, jumped = decide(policy(), later, memory)
    assert jumped.signals.split_tokens_total.observed_s == 0.0
    assert jumped.signals.queue_finished_total.observed_s == 0.0


@pytest.mark.parametrize(
    ("value", "state", "command"),
    [
        (None, Watermark(2_000, True), None),
        (None, Watermark(50, False), "default"),
        (50, Watermark(50, False), None),
        (2_000, Watermark(2_000, True), 2_000),
        (0, Watermark(2_000, True), 0),
    ],
)
def test_watermark_is_only_set(kit, value: int | None, state: Watermark, command: object) -> None:
    made = Policy.model_validate({"version": 1, "watermark": {"value": value}})
    decision, _ = decide(made, kit.change(kit.idle_snapshot(), watermark=state), Memory())
    assert decision.commands.watermark == command
    expected = Reason.AT_TARGET if command is None else Reason.POLICY_VALUE
    assert decision.of(Lever.WATERMARK).reason is expected


def test_start_puts_the_policy_in_force(kit) -> None:
    made = policy(
        pools={"offload": {"start": "40%"}},
        hot={"start": 1.3},
        admission={"order": "held-prefix-first", "max_waiting_sessions": 2},
    )
    commands = start_command(made, kit.geometry)
    assert (commands.offload_target_blocks, commands.hisparse_target_blocks) == (4_000, 6_000)
    assert commands.multiplier == 42 / 32
    assert commands.watermark == 77
    assert commands.admission is not None
    assert commands.admission.order is AdmissionOrder.HELD_PREFIX_FIRST
    assert commands.admission.max_waiting_sessions == 2


@pytest.mark.parametrize("mode", ["advise", "off"])
def test_start_leaves_alone_what_may_not_act(kit, mode: str) -> None:
    assert not start_command(policy(mode=mode), kit.geometry)
    one_off = start_command(policy(levers={"split": {"mode": mode}}), kit.geometry)
    assert one_off.offload_target_blocks is None
    assert one_off.multiplier == 2.0


def test_snapshots_decisions_and_memory_survive_json(pressed) -> None:
    """A journal can be decided again: what it stores is what was decided on."""
    decision, memory = decide(policy(), pressed, Memory())
    for value, kind in ((pressed, Snapshot), (decision, Decision), (memory, Memory)):
        adapter = TypeAdapter(kind)
        assert adapter.validate_json(adapter.dump_json(value)) == value


def test_sentences_are_sentences(kit, pressed) -> None:
    modes = ("act", "advise", "off")
    for snapshot in (pressed, kit.idle_snapshot(), kit.change(pressed, report_age_s=60.0)):
        for mode in modes:
            for one in decide(policy(mode=mode), snapshot, Memory())[0].levers:
                assert one.sentence[0].isupper()
                assert one.sentence.endswith(".")
                assert one.sentence.count(".  ") == 0


def test_decisions_cannot_be_changed(pressed) -> None:
    decision, _ = decide(policy(), pressed, Memory())
    with pytest.raises(dataclasses.FrozenInstanceError):
        decision.tick = 5  # type: ignore[misc]
