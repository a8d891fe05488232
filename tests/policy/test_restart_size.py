"""The multiplier where a restart changes it: the size that one should take, or what is missing."""

from __future__ import annotations

from typing import Any

import pytest

from hisparsed.policy.decide import decide
from hisparsed.policy.decisions import LeverDecision, Reason
from hisparsed.policy.memory import Memory
from hisparsed.policy.schema import Policy
from hisparsed.policy.signals import Lever, SampledRows

SAMPLES_S = 130


def policy(**hot: Any) -> Policy:
    return Policy.model_validate({"version": 1, "hot": hot})


def fixed(kit: Any, **changes: Any) -> Any:
    """vLLM's kernels: leases of 2x, 64 blocks, on a quarter of the GPU blocks."""
    defaults = {
        "geometry__hot_live": False,
        "geometry__max_lease_blocks": 64,
        "hot__counted": False,
        "live_levers": frozenset(Lever) - {Lever.MULTIPLIER},
        "requests__running": 4,
        "requests__none": 4,
    }
    return kit.change(kit.idle_snapshot(), **{**defaults, **changes})


def last(
    kit: Any, made: Policy, snapshot: Any, *, bytes_per_s: float | None, seconds: int = SAMPLES_S
) -> LeverDecision:
    """After ``seconds``; vLLM's counters move once in 50 s."""
    memory = Memory()
    for one in range(seconds + 1):
        rows = None
        if bytes_per_s is not None:
            sampled_s = one // 50 * 50
            rows = SampledRows(sampled_s, sampled_s, int(bytes_per_s * sampled_s), 1.0)
        at = kit.change(snapshot, at_s=1000.0 + one, tick=one, sampled_rows=rows)
        decision, memory = decide(made, at, memory)
    found: LeverDecision = decision.of(Lever.MULTIPLIER)
    return found


PRESSED = {"gpu__free_blocks": 100, "requests__waiting": 1, "gpu__waiting_for_blocks": True}
ROOM = {"gpu__free_blocks": 15_000}


def test_a_restart_should_take_what_lets_those_who_wait_run(kit: Any) -> None:
    found = last(kit, policy(), fixed(kit, **PRESSED), bytes_per_s=1e6)
    assert (found.reason, found.cause) == (Reason.PENDING_RESTART, Reason.GPU_POOL_PRESSURE)
    assert (found.current, found.wanted) == (2.0, 1.0), "one request holds more than all leases"
    assert found.sentence.startswith("Needs a restart: start with 1x (hot.start) instead of 2x")
    assert "sampled_bytes_per_s" in found.figures


def test_it_shrinks_no_further_than_needed(kit: Any) -> None:
    small = fixed(
        kit,
        requests__running=40,
        requests__none=40,
        requests__waiting=4,
        gpu__free_blocks=100,
        gpu__waiting_for_blocks=True,
    )
    found = last(kit, policy(), small, bytes_per_s=1e6)
    # 4 x 19,900 / 40 blocks less the free ones, from 8 groups of 40 requests: 6 blocks each; a
    # step of the policy is 16.
    assert found.wanted == pytest.approx(48 / 32)
    found = last(kit, policy(step=0.0625), small, bytes_per_s=1e6)
    assert found.wanted == pytest.approx((64 - 6) / 32)


def test_misses_bound_how_far(kit: Any) -> None:
    budget = 20 * 2**30
    found = last(kit, policy(), fixed(kit, **PRESSED), bytes_per_s=budget / 1.6 * 1.3)
    assert found.cause is Reason.GPU_POOL_PRESSURE
    assert found.wanted == pytest.approx(47 / 32), "misses grow with the power 1.5 of the ratio"
    found = last(kit, policy(), fixed(kit, **PRESSED), bytes_per_s=budget * 1.3)
    assert (found.reason, found.wanted) == (Reason.LIMITED_BY_PCIE, 2.0)


@pytest.mark.parametrize(("bytes_per_s", "seconds"), [(None, SAMPLES_S), (1e6, 110)])
@pytest.mark.parametrize("changes", [PRESSED, ROOM], ids=["pressed", "room"])
def test_without_samples_one_code_says_what_is_missing(
    kit: Any, changes: dict[str, Any], bytes_per_s: float | None, seconds: int
) -> None:
    found = last(kit, policy(), fixed(kit, **changes), bytes_per_s=bytes_per_s, seconds=seconds)
    assert (found.reason, found.wanted) == (Reason.MISSING_SIGNAL, 2.0)
    assert "sampled counters of missed rows were seen for" in found.sentence
    assert "120s are needed" in found.sentence


def test_room_is_advised_to_be_used(kit: Any) -> None:
    found = last(kit, policy(max=8), fixed(kit, **ROOM), bytes_per_s=1e6)
    assert (found.reason, found.cause) == (Reason.PENDING_RESTART, Reason.ROOM_TO_GROW)
    assert found.wanted == 8.0, "12,000 blocks are to spare, and the policy's most is less"
    busy = fixed(kit, requests__running=60, requests__none=60, gpu__free_blocks=8_000)
    found = last(kit, policy(max=8), busy, bytes_per_s=1e6)
    assert found.wanted == pytest.approx((64 + (8_000 - 3_000) // 480) / 32)


@pytest.mark.parametrize(
    ("changes", "bytes_per_s", "reason"),
    [
        (ROOM, 0.0, Reason.NO_BENEFIT),
        ({**ROOM, "requests__running": 0, "requests__none": 0}, 1e6, Reason.NO_TRAFFIC),
        ({**ROOM, "requests__full": 4, "requests__none": 0}, 1e6, Reason.NO_BENEFIT),
        ({**PRESSED, "hot__multiplier": 1.0}, 1e6, Reason.LIMITED_BY_FLOOR),
        ({"gpu__free_blocks": 3_000}, 1e6, Reason.IN_DEAD_BAND),
    ],
)
def test_it_says_why_it_keeps_the_size(
    kit: Any, changes: dict[str, Any], bytes_per_s: float, reason: Reason
) -> None:
    found = last(kit, policy(), fixed(kit, **changes), bytes_per_s=bytes_per_s)
    assert (found.reason, found.wanted) == (reason, found.current)


def test_pressure_must_last(kit: Any) -> None:
    snapshot = fixed(kit, **PRESSED)
    memory = Memory()
    for one in range(200):
        calm = {"gpu__free_blocks": 4_000, "requests__waiting": 0, "gpu__waiting_for_blocks": False}
        rows = SampledRows(one, one, one * 10**6, 1.0)
        at = kit.change(snapshot, at_s=1000.0 + one, tick=one, sampled_rows=rows)
        if one < 195:
            at = kit.change(at, **calm)
        decision, memory = decide(policy(), at, memory)
    assert decision.of(Lever.MULTIPLIER).reason is Reason.WINDOW_NOT_FULL


def test_the_policys_range_still_comes_first(kit: Any) -> None:
    found = last(kit, policy(max=1.5), fixed(kit), bytes_per_s=None, seconds=3)
    assert (found.cause, found.wanted) == (Reason.OUTSIDE_BOUNDS, 1.5)
