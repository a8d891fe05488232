"""Invariants over every sequence of snapshots: floors, ceilings, off, and determinism."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparsed.policy.bounds import hot_bounds, lease_blocks, reserve_blocks, split_bounds
from hisparsed.policy.decide import decide
from hisparsed.policy.decisions import Reason
from hisparsed.policy.memory import Memory
from hisparsed.policy.schema import Policy
from hisparsed.policy.signals import GhostPoint, LeasePoint, Lever, Progress, RequestHot, Snapshot
from tests.examples import examples

PERCENT = st.integers(0, 100)
MODES = st.sampled_from(["act", "advise", "off"])


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    hisparse_floor = draw(st.integers(0, 90))
    offload_floor = draw(st.integers(0, 100 - hisparse_floor))
    reserve = draw(st.integers(0, 100 - hisparse_floor - offload_floor))
    hot_min = draw(st.integers(4, 12)) / 4
    hot_max = hot_min + draw(st.integers(0, 8)) / 4
    lever_modes = {lever.value: {"mode": draw(st.none() | MODES)} for lever in Lever}
    return Policy.model_validate(
        {
            "version": 1,
            "levers": lever_modes,
            "pools": {
                "hisparse": {"floor": f"{hisparse_floor}%"},
                "offload": {
                    "floor": f"{offload_floor}%",
                    "ceiling": f"{draw(st.integers(offload_floor, 100))}%",
                },
                "reserve": f"{reserve}%",
                "release_reserve": draw(st.booleans()),
            },
            "rebalance": {
                "strategy": draw(st.sampled_from(["equal-reach", "marginal-value"])),
                "margin": f"{draw(PERCENT)}%",
                "window": draw(st.sampled_from(["1s", "5s"])),
                "step": f"{draw(st.integers(1, 20))}%",
                "step_towards_safety": f"{draw(st.integers(20, 100))}%",
                "cool_down": "3s",
                "cool_down_towards_safety": draw(st.sampled_from(["0s", "2s"])),
                "hold_off": "4s",
            },
            "hot": {
                "min": hot_min,
                "max": hot_max,
                "start": hot_min,
                "window_shrink": "1s",
                "window_grow": "2s",
                "sharing": draw(st.sampled_from(["even", "marginal-gain"])),
            },
            "admission": {"max_wait": draw(st.sampled_from(["10s", "20m"]))},
            "stall_after": "3s",
            "watermark": {"value": draw(st.none() | st.integers(0, 100))},
        }
    )


@st.composite
def growth(draw: st.DrawFn) -> dict[str, int]:
    """By how much counters rise from one tick to the next; rarely, a new engine starts."""
    if draw(st.integers(0, 19)) == 0:
        return {}
    return {
        "hot__loads_total": draw(st.integers(0, 10**5)),
        "hot__references_total": draw(st.integers(0, 10**6)),
        "hot__h2d_bytes_total": draw(st.integers(0, 10**12)),
        "requests__finished_total": draw(st.integers(0, 3)),
        "prefix__query_tokens_total": draw(st.integers(0, 10**6)),
        "tokens__prompt_total": draw(st.integers(0, 10**4)),
        "progress__scheduled_tokens_total": draw(st.sampled_from([0, 10**4])),
        "hisparse__ghost": draw(st.integers(0, 10**5)),
        "offload__ghost": draw(st.integers(0, 10**5)),
    }


@st.composite
def hot_requests(draw: st.DrawFn) -> tuple[RequestHot, ...]:
    found = []
    for index in range(draw(st.integers(0, 4))):
        held = draw(st.integers(1, 160))
        misses = draw(st.lists(st.integers(0, 999), max_size=4))
        curve = tuple(LeasePoint(32 * (at + 1), float(count)) for at, count in enumerate(misses))
        found.append(RequestHot(f"r{index}", held, held, curve))
    return tuple(found)


@st.composite
def disturbances(draw: st.DrawFn) -> dict[str, Any]:
    """The values that may differ from one tick to the next; deliberately not consistent."""
    return {
        "report_age_s": draw(st.sampled_from([0.0, 0.0, 0.0, 9.0])),
        "hisparse__in_use_blocks": draw(st.integers(0, 10_000)),
        "hisparse__free_blocks": draw(st.sampled_from([0, 5_000])),
        "offload__in_use_chunks": draw(st.integers(0, 20_000)),
        "offload__capacity_chunks": draw(st.integers(0, 180_000)),
        "pending_blocks": draw(st.sampled_from([0, 0, 7])),
        "draining_blocks": draw(st.sampled_from([0, 0, 7])),
        "head_need_blocks": draw(st.integers(0, 300)),
        "gpu__free_blocks": draw(st.integers(0, 20_000)),
        "gpu__waiting_for_blocks": draw(st.booleans()),
        "requests__running": draw(st.integers(0, 64)),
        "requests__waiting": draw(st.integers(0, 300)),
        "requests__none": draw(st.integers(0, 64)),
        "hot__counted": draw(st.sampled_from([True, True, False])),
        "reserve__blocks": draw(st.integers(0, 10_000)),
        "requests_hot": draw(hot_requests()),
        "sessions__live_set_tokens": draw(st.integers(0, 10**6)),
        "sessions__live_sessions": draw(st.integers(0, 9)),
    }


def run(
    kit: Any, policy: Policy, lent: int, multiplier: float, steps: list[dict[str, Any]]
) -> list[tuple[Snapshot, Any]]:
    """Every decision applied at once, over whatever the steps do to the node."""
    snapshot = kit.change(kit.idle_snapshot(lent=lent), hot__multiplier=multiplier)
    memory, out = Memory(), []
    for step, grown in steps:
        snapshot = kit.change(snapshot, at_s=snapshot.at_s + 1, **step, **risen(snapshot, grown))
        decision, memory = decide(policy, snapshot, memory)
        out.append((snapshot, decision))
        commands = decision.commands
        if commands.offload_target_blocks is not None:
            target = commands.offload_target_blocks
            snapshot = kit.change(snapshot, offload__target_blocks=target)
        if commands.multiplier is not None:
            snapshot = kit.change(snapshot, hot__multiplier=commands.multiplier)
        if commands.reserve_target_blocks is not None:
            snapshot = kit.change(
                snapshot,
                reserve__target_blocks=commands.reserve_target_blocks,
                reserve__releasing=commands.release_reserve,
            )
        if commands.admission is not None:
            snapshot = dataclasses.replace(snapshot, admission=commands.admission)
    return out


def risen(snapshot: Snapshot, grown: dict[str, int]) -> dict[str, Any]:
    """Counters after they rose; without growth they all start from zero."""
    if not grown:
        return {
            "hot__loads_total": 0,
            "hot__references_total": 0,
            "tokens__prompt_total": 0,
            "progress": Progress(0, 0),
            "hisparse__ghost": (),
        }
    changes: dict[str, Any] = {}
    for path, amount in grown.items():
        part, name = path.split("__")
        now = getattr(getattr(snapshot, part) or Progress(0, 0), name)
        if name == "ghost":
            totals = [point.tokens_total for point in now] or [0, 0]
            points = ((100, totals[0] + amount), (1_900, totals[1] + 2 * amount))
            changes[path] = tuple(GhostPoint(*point) for point in points)
        elif part == "progress":
            steps = snapshot.progress.steps_total + 1 if snapshot.progress else 1
            changes[part] = Progress(steps, now + amount)
        else:
            changes[path] = now + amount
    return changes


SEQUENCES = st.lists(st.tuples(disturbances(), growth()), min_size=1, max_size=25)
LENT = st.integers(0, 10_000)
MULTIPLIER = st.integers(1, 160).map(lambda blocks: blocks / 32)


@pytest.mark.examples
@settings(max_examples=examples(50, 150), deadline=None, derandomize=True)
@given(policy=policies(), lent=LENT, multiplier=MULTIPLIER, steps=SEQUENCES)
def test_floors_ceilings_and_off_hold(kit, policy, lent, multiplier, steps) -> None:
    bounds = split_bounds(policy, kit.geometry)
    hot = hot_bounds(policy, kit.geometry)
    for snapshot, decision in run(kit, policy, lent, multiplier, steps):
        commands = decision.commands
        if commands.offload_target_blocks is not None:
            target = commands.offload_target_blocks
            assert bounds.low_blocks <= target <= bounds.high_blocks
            reserve = reserve_blocks(policy, kit.geometry)
            whole = target + commands.hisparse_target_blocks + reserve
            assert whole == kit.geometry.budget_blocks
            assert commands.reserve_target_blocks in (None, reserve)
            assert not commands.release_reserve, "this node cannot"
            assert policy.mode_of(Lever.SPLIT).value == "act"
            grew_past = target > max(
                snapshot.offload.target_blocks,
                kit.geometry.budget_blocks
                - reserve
                - max(snapshot.hisparse.in_use_blocks, snapshot.head_need_blocks),
            )
            outside = decision.of(Lever.SPLIT).reason is Reason.OUTSIDE_BOUNDS
            assert outside or not grew_past
        if commands.multiplier is not None:
            lease = lease_blocks(kit.geometry, commands.multiplier)
            assert hot.min_blocks <= lease <= hot.max_blocks
            assert commands.multiplier * 32 == lease
            assert policy.mode_of(Lever.MULTIPLIER).value == "act"
        if commands.hot_leases:
            lease = lease_blocks(kit.geometry, snapshot.hot.multiplier)
            leases = commands.hot_leases.values()
            assert all(hot.min_blocks <= blocks <= hot.max_blocks for blocks in leases)
            assert sum(leases) <= lease * len(leases)
            assert policy.mode_of(Lever.MULTIPLIER).value == "act"
        if commands.admission is not None:
            assert policy.mode_of(Lever.ADMISSION).value == "act"
            assert commands.admission.ageing_s <= policy.admission.max_wait
        if snapshot.report_age_s > policy.stale_after:
            assert not commands


@pytest.mark.examples
@settings(max_examples=examples(20, 60), deadline=None, derandomize=True)
@given(policy=policies(), lent=LENT, multiplier=MULTIPLIER, steps=SEQUENCES)
def test_every_decision_is_complete_and_consistent(kit, policy, lent, multiplier, steps) -> None:
    for _, decision in run(kit, policy, lent, multiplier, steps):
        assert tuple(one.lever for one in decision.levers) == tuple(Lever)
        for one in decision.levers:
            assert all(abs(value) < float("inf") for value in one.figures.values())
            assert one.sentence.endswith(".")
            if one.acts:
                assert one.cause is one.reason
            elif one.reason is not Reason.ADVISE_ONLY:
                assert one.wanted == one.current
        acting = [one for one in decision.levers if one.acts]
        assert bool(acting) == bool(decision.commands)


@pytest.mark.examples
@settings(max_examples=examples(10, 40), deadline=None, derandomize=True)
@given(policy=policies(), lent=LENT, multiplier=MULTIPLIER, steps=SEQUENCES)
def test_the_same_snapshots_give_the_same_decisions(kit, policy, lent, multiplier, steps) -> None:
    first = run(kit, policy, lent, multiplier, steps)
    memory = Memory()
    for snapshot, decision in first:
        again, memory = decide(policy, snapshot, memory)
        assert again == decision


@pytest.mark.examples
@settings(max_examples=examples(12, 60), deadline=None, derandomize=True)
@given(
    lent=st.integers(100, 5_000),
    in_use=st.integers(0, 8_500),
    margin=st.integers(0, 100),
)
def test_the_offload_pool_is_soon_safe_when_the_budget_allows(kit, lent, in_use, margin) -> None:
    policy = Policy.model_validate(
        {
            "version": 1,
            "pools": {"hisparse": {"floor": 0}, "offload": {"floor": 0, "ceiling": 1}},
            "rebalance": {"margin": f"{margin}%", "step_towards_safety": "10%"},
        }
    )
    plant = kit.Plant(policy, lent)
    plant.in_use_blocks = in_use
    plant.run(40)
    split = plant.decisions[-1].of(Lever.SPLIT)
    need = split.figures["need_blocks"]
    reached = split.current >= need and plant.snapshot.offload.lent_blocks >= need
    assert reached or split.reason in (Reason.LIMITED_BY_IN_USE, Reason.LIMITED_BY_FLOOR)
