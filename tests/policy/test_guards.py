"""States that look like a shortage of KV memory and are not: each has its own code."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hisparsed.policy.decide import decide
from hisparsed.policy.decisions import Reason
from hisparsed.policy.memory import Memory
from hisparsed.policy.schema import Policy
from hisparsed.policy.signals import Lever, Progress, StepCpu


def policy(**sections: Any) -> Policy:
    return Policy.model_validate({"version": 1, **sections})


def waiting(kit, free_share: float, **changes: Any):
    """Four requests run, two wait, and vLLM says that neither a limit nor a step holds them."""
    defaults = {
        "gpu__free_blocks": round(free_share * kit.geometry.gpu_blocks_total),
        "gpu__waiting_for_blocks": True,
        "requests__running": 4,
        "requests__none": 4,
        "requests__waiting": 2,
    }
    return kit.change(kit.idle_snapshot(), **{**defaults, **changes})


def ticks(kit, snapshot, seconds: int, tokens_a_step: int = 0, steps: int = 10):
    """The same node every second; counters of progress rise, or stay at 0."""
    return [
        dataclasses.replace(one, progress=Progress(steps * index, tokens_a_step * steps * index))
        for index, one in enumerate(kit.held_for(snapshot, seconds, tokens__prompt_total=10))
    ]


def multiplier(made: Policy, snapshots: list[Any], kit: Any):
    return kit.reasons_over(made, snapshots, Lever.MULTIPLIER)[-1]


@pytest.mark.parametrize(
    ("free_share", "reason"),
    [(0.97, Reason.NOT_KV_PRESSURE), (0.25, Reason.NOT_KV_PRESSURE), (0.24, Reason.NO_BENEFIT)],
)
def test_waiting_at_three_percent_use_is_no_kv_pressure(
    kit, free_share: float, reason: Reason
) -> None:
    """Out of memory elsewhere, or a stuck connector: giving KV memory away does not help."""
    snapshot = waiting(kit, free_share, requests__none=0, requests__full=4)
    decision = multiplier(policy(), ticks(kit, snapshot, 10, 100), kit)
    assert decision.reason is reason


@pytest.mark.parametrize(
    ("need", "reason"), [(5_000, Reason.NOT_KV_PRESSURE), (5_001, Reason.GPU_POOL_PRESSURE)]
)
def test_what_the_head_of_the_queue_needs_tells_more_than_a_share(
    kit, need: int, reason: Reason
) -> None:
    snapshot = waiting(kit, 0.25, gpu__head_need_blocks=need)
    assert multiplier(policy(), ticks(kit, snapshot, 10, 100), kit).reason is reason


def test_waiting_for_a_limit_is_no_kv_pressure(kit) -> None:
    snapshot = waiting(kit, 0.01, admission__max_running=4)
    decision = multiplier(policy(), ticks(kit, snapshot, 10, 100), kit)
    assert decision.reason is Reason.NOT_KV_PRESSURE
    assert "limit of 4" in decision.sentence


@pytest.mark.parametrize(
    ("tokens_a_step", "reason"),
    [(899, Reason.GPU_POOL_PRESSURE), (900, Reason.PREFILL_BOUND)],
)
def test_full_steps_mean_that_prefill_is_the_bottleneck(
    kit, tokens_a_step: int, reason: Reason
) -> None:
    geometry = dataclasses.replace(kit.geometry, max_step_tokens=1_000)
    snapshot = kit.change(waiting(kit, 0.01), geometry=geometry)
    decision = multiplier(policy(), ticks(kit, snapshot, 10, tokens_a_step), kit)
    assert decision.reason is reason
    assert decision.figures["step_fill_ratio"] == pytest.approx(tokens_a_step / 1_000)


@pytest.mark.parametrize(
    ("busy", "reason"),
    [
        (None, Reason.GPU_POOL_PRESSURE),
        (0.89, Reason.GPU_POOL_PRESSURE),
        (0.9, Reason.ENGINE_CORE_BOUND),
    ],
)
def test_a_busy_engine_core_is_the_bottleneck(kit, busy: float | None, reason: Reason) -> None:
    snapshot = kit.change(waiting(kit, 0.01), step_cpu=StepCpu(0.02, 0.05, busy))
    decision = multiplier(policy(), ticks(kit, snapshot, 10, 100), kit)
    assert decision.reason is reason
    assert decision.figures.get("core_busy_ratio") == busy


@pytest.mark.parametrize(("seconds", "stalled"), [(29, False), (30, True)])
def test_no_progress_with_memory_free_is_a_stall(kit, seconds: int, stalled: bool) -> None:
    """Every law wants to act; a stall holds them all, and says since when."""
    snapshot = waiting(kit, 0.9, sessions__live_set_tokens=10**9, sessions__live_sessions=9)
    snapshot = kit.change(snapshot, offload__target_blocks=300)
    memory = Memory()
    for one in ticks(kit, snapshot, seconds, tokens_a_step=0):
        decision, memory = decide(policy(), one, memory)
        memory = dataclasses.replace(memory, split=Memory().split)
    codes = {one.lever: one.reason for one in decision.levers}
    assert (codes[Lever.SPLIT] is Reason.STALLED) is stalled
    assert (codes[Lever.ADMISSION] is Reason.STALLED) is stalled
    assert bool(decision.commands) is not stalled
    if stalled:
        assert "no progress for 30s" in decision.of(Lever.SPLIT).sentence


@pytest.mark.parametrize(
    "changes",
    [
        {"requests__running": 0, "requests__waiting": 0},
        {"gpu__free_blocks": 100},
        {"hisparse__in_use_blocks": 9_300, "head_need_blocks": 51},
    ],
    ids=["nobody is there", "GPU blocks are short", "host blocks are short"],
)
def test_standing_still_is_no_stall(kit, changes: dict[str, int]) -> None:
    """Without work it is idleness; with memory short, moving memory may be the cure."""
    snapshots = ticks(kit, waiting(kit, 0.9, **changes), 60)
    for lever in Lever:
        reasons = {one.reason for one in kit.reasons_over(policy(), snapshots, lever)}
        assert Reason.STALLED not in reasons


def test_a_stall_ends_with_the_first_token(kit) -> None:
    snapshots = ticks(kit, waiting(kit, 0.9), 40)
    moving = dataclasses.replace(snapshots[-1], progress=Progress(400, 1))
    decisions = kit.reasons_over(policy(), [*snapshots[:-1], moving], Lever.WATERMARK)
    assert decisions[-2].reason is Reason.STALLED
    assert decisions[-1].reason is Reason.AT_TARGET


def test_an_operator_is_obeyed_in_a_stall(kit) -> None:
    snapshots = ticks(kit, waiting(kit, 0.9), 40)
    told = policy(watermark={"value": 77}, pools={"offload": {"floor": "10%"}})
    assert kit.reasons_over(told, snapshots, Lever.WATERMARK)[-1].reason is Reason.POLICY_VALUE
    assert kit.reasons_over(told, snapshots, Lever.SPLIT)[-1].reason is Reason.OUTSIDE_BOUNDS


def test_without_a_count_of_steps_no_stall_is_claimed(kit) -> None:
    snapshots = kit.held_for(waiting(kit, 0.9), 60)
    reasons = {one.reason for one in kit.reasons_over(policy(), snapshots, Lever.WATERMARK)}
    assert reasons == {Reason.AT_TARGET}


@pytest.mark.parametrize("free_share", [0.01, 0.5])
def test_rows_that_are_not_counted_are_missing_not_zero(kit, free_share: float) -> None:
    snapshot = waiting(
        kit,
        free_share,
        hot__counted=False,
        requests__waiting=int(free_share < 0.25),
        gpu__waiting_for_blocks=free_share < 0.25,
    )
    decision = multiplier(policy(), ticks(kit, snapshot, 60, 100), kit)
    assert decision.reason is Reason.MISSING_SIGNAL
    assert "predicted_bytes_per_s" not in decision.figures
