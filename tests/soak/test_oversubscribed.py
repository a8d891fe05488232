"""The over-subscribed experiment: its load, its clock, its pools, and one short real run."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import islice
from typing import Any

import pytest
from fake_engine import GEOMETRY, FakeEngine

from hisparsed.policy.reach import reach_at
from hisparsed.replay.scaled_trace import ScaledTrace, scale_trace
from hisparsed.replay.trace import load_trace
from hisparsed.soak.engine import SteppedClock
from tests.bench import oversubscribed
from tests.bench.oversubscribed import (
    Load,
    Row,
    Served,
    policy_of,
    run_one,
    serve,
    sessions_of,
    shared_blocks_for,
    table,
)

SMALL = Load(clients=6, think_s=1.0, warm_up_s=2.0, measured_s=20.0)


@pytest.fixture(scope="module")
def trace() -> ScaledTrace:
    return scale_trace(load_trace(), Fraction(1, 64), 1024)


def served(trace: ScaledTrace, seed: int = 0, **changes: Any) -> Served:
    load = replace(SMALL, **changes)
    return serve(FakeEngine(), SteppedClock(), trace, load, policy_of("vLLM's order"), seed)


def test_a_step_takes_its_fixed_time_and_a_time_for_each_token(
    trace: ScaledTrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = served(trace, clients=1)
    assert plain.ttft_s
    assert plain.ttft_s == pytest.approx([0.021] * len(plain.ttft_s))
    monkeypatch.setattr(oversubscribed, "TOKEN_S", 0.1)
    slow = served(trace, clients=1)
    assert slow.ttft_s == pytest.approx([0.12] * len(slow.ttft_s))


def test_a_seed_decides_everything(trace: ScaledTrace) -> None:
    assert served(trace) == served(trace)
    assert served(trace).ttft_s != served(trace, seed=1).ttft_s
    assert served(trace).completed > 50


def test_a_longer_pause_means_fewer_calls(trace: ScaledTrace) -> None:
    assert served(trace, think_s=4.0).completed < 0.5 * served(trace).completed


def test_calls_that_nobody_answers_count_with_their_wait(trace: ScaledTrace) -> None:
    engine = FakeEngine()
    engine.deaf = {f"call-{number}" for number in range(10_000)}
    load = replace(SMALL, warm_up_s=0.0)
    found = serve(engine, SteppedClock(), trace, load, policy_of("vLLM's order"), 0)
    assert found.completed == 0
    assert len(found.unanswered_wait_s) == load.clients
    assert max(found.unanswered_wait_s) == pytest.approx(load.measured_s, abs=load.think_s)
    assert not engine.open, "open calls are taken back at the end"


def test_each_lap_over_the_trace_has_prompts_of_its_own(trace: ScaledTrace) -> None:
    calls = list(islice(sessions_of(trace, 0, 5, 6), 400))
    seeds = {prompts.seed for prompts, _ in calls}
    assert len(seeds) > 1
    assert len({(prompts.seed, call.tail_block) for prompts, call in calls}) == len(calls)


@pytest.mark.parametrize("reach_tokens", [1000, 4000, 9000])
def test_the_pools_reach_as_far_as_asked_and_no_block_further(reach_tokens: int) -> None:
    geometry = GEOMETRY
    shared, lent = shared_blocks_for(geometry, reach_tokens)
    reach = reach_at(geometry, lent, 0, 0, shared)
    assert reach_tokens <= reach.min_tokens < reach_tokens + 3 * 16
    assert reach.offload_tokens >= reach.hisparse_tokens


def test_a_reach_beyond_the_budget_is_refused() -> None:
    geometry = GEOMETRY
    with pytest.raises(ValueError, match="more than 1000 host blocks"):
        shared_blocks_for(geometry, 1e9)


def test_the_table_names_orders_and_starved_calls() -> None:
    row = Row("as shipped", 3, 41, 1.5, 9.0, 130.0, 2, 0.5, 1.0, 100)
    (line,) = (one for one in table([row]).splitlines() if one.startswith("as shipped"))
    assert line.split() == [
        "as",
        "shipped",
        "3",
        "41",
        "1.50",
        "9.00",
        "130.00",
        "2",
        "50%",
    ]


@pytest.mark.long
@pytest.mark.engine
def test_over_subscribed_the_policy_puts_held_prefixes_first() -> None:
    load = Load(clients=12, think_s=0.5, warm_up_s=3.0, measured_s=3.0)
    row = run_one("as shipped", 0, load)
    assert row.held_first_share > 0.5
    assert row.completed > 0
    assert row.starved == 0
    assert row.hit_share > 0
