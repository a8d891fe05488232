"""The offload pool's own options: what is stored, what is evicted, how many copies are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small import agents, small_node

from hisparsed.errors import UserError
from hisparsed.plan.layout import real_layout
from hisparsed.simulate.policies import Store, choose_policy
from hisparsed.simulate.results import Measures, finished_calls
from hisparsed.simulate.run import run_policy
from hisparsed.simulate.scenario import Scenario, Traffic
from hisparsed.simulate.sizes import stock_sizes
from hisparsed.simulate.workload import TraceSessions

MANY = (Traffic(TraceSessions(agents(16, 6, first=900), 64), 16),)
"""More than the GPU pool keeps between the calls of a session."""


def scenario(**changes: Any) -> Scenario:
    node = small_node()
    values: dict[str, Any] = {
        "node": node,
        "traffic": (Traffic(TraceSessions(agents(6, 6), 64), 6),),
        "host_budget": node.host.budget,
        "duration_s": 60.0,
        "warmup_s": 10.0,
        **changes,
    }
    return Scenario(**values)


def run(folder: Path, policy: str, **changes: Any) -> Measures:
    return run_policy(scenario(**changes), choose_policy(policy), 0, work_folder=folder)


def hits(measures: Measures) -> int:
    return sum(call.cached_tokens for call in finished_calls(measures))


def test_the_options_are_of_the_node_not_of_the_document() -> None:
    chosen = choose_policy("policy,offload.policy=arc,offload.threshold=2,copies=8,hot.start=3")
    assert chosen.store == Store(eviction="arc", threshold=2, copies=8)
    assert choose_policy("stock,prefill.reads=25%").store.prefill_reads == 0.25
    assert chosen.text is not None
    assert "copies" not in chosen.text
    assert choose_policy("stock,offload.prompt_only=true").store.prompt_only


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("stock,offload.policy=fifo", "offload.policy is lru or arc, not fifo"),
        ("policy,copies=0", "copies is a whole number of 1 to 64"),
        ("policy,offload.threshold=x", "offload.threshold is a whole number"),
        ("stock,offload.prompt_only=yes", "is true or false, not yes"),
        ("stock,host.budget=0GiB", "host.budget: 0 holds nothing"),
        (
            "policy,host.budget=much",
            'policy,host.budget=much: host.budget: "much" is not a size; write',
        ),
    ],
)
def test_a_wrong_option_says_what_is_right(spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        choose_policy(spec)


def test_one_copy_leaves_stock_vllm_as_many_more_chunks() -> None:
    plain = scenario(host_budget=512 << 30)
    (_, eight), (_, one) = (
        stock_sizes(plain, choose_policy(name), plain.host_budget)
        for name in ("stock", "stock,copies=1")
    )
    padded = real_layout(plain.node, 8).chunk_bytes * 8 / real_layout(plain.node, 1).chunk_bytes
    assert one / eight == pytest.approx(padded, rel=0.01)


@pytest.mark.long
@pytest.mark.engine
@pytest.mark.parametrize("name", ["stock", "policy"])
def test_a_budget_of_its_own_is_what_a_policy_runs_with(tmp_path: Path, name: str) -> None:
    plain, twice = (
        run(tmp_path, spec, duration_s=15.0, warmup_s=5.0)
        for spec in (name, f"{name},host.budget=192MiB")
    )
    sizes = [
        one.samples[-1].hisparse_blocks + one.samples[-1].offload_blocks for one in (plain, twice)
    ]
    assert sizes[1] == pytest.approx(2 * sizes[0], rel=0.02)


@pytest.mark.long
@pytest.mark.engine
def test_eight_copies_hold_an_eighth_of_the_chunks_in_a_lent_block(tmp_path: Path) -> None:
    one, eight = (run(tmp_path, f"policy,copies={copies}") for copies in (1, 8))
    for measures, copies in ((one, 1), (eight, 8)):
        last = measures.samples[-1]
        tokens = last.offload_reach_tokens / max(1, last.offload_blocks)
        assert tokens < 64 * 40 / copies
    assert eight.samples[-1].offload_blocks > 2 * one.samples[-1].offload_blocks


@pytest.mark.long
@pytest.mark.engine
def test_what_is_offered_once_is_not_stored_below_the_threshold(tmp_path: Path) -> None:
    """Indexer KV that the GPU gave up and the pool never took has to be computed again."""
    stored, held_back = (
        run(tmp_path, f"policy,offload.threshold={least}", traffic=MANY, host_budget=400 << 20)
        for least in (1, 3)
    )
    assert hits(held_back) < hits(stored)


@pytest.mark.long
@pytest.mark.engine
def test_answers_that_are_not_offloaded_are_computed_again(tmp_path: Path) -> None:
    all_of_it, prompts = (
        run(tmp_path, f"policy,offload.prompt_only={only}", traffic=MANY, host_budget=400 << 20)
        for only in ("false", "true")
    )
    assert hits(prompts) < hits(all_of_it)


@pytest.mark.long
@pytest.mark.engine
def test_prompts_read_the_share_of_their_prefix_that_the_policy_says(tmp_path: Path) -> None:
    """Misses are read as before, so reads fall by less than the share."""
    read = {
        share: run(tmp_path, f"policy,prefill.reads={share}%", traffic=MANY, host_budget=400 << 20)
        .samples[-1]
        .link_bytes
        for share in (100, 0)
    }
    assert 0 < read[0] < read[100]


@pytest.mark.engine
@pytest.mark.parametrize("name", [pytest.param("stock", marks=pytest.mark.long), "policy"])
def test_arc_serves_every_call_on_lent_blocks(tmp_path: Path, name: str) -> None:
    measures = run(tmp_path, f"{name},offload.policy=arc")
    assert len(finished_calls(measures)) > 20
    assert not any(call.failed for call in measures.calls)


@pytest.mark.long
@pytest.mark.engine
def test_hot_buffers_can_be_held_below_what_a_step_may_select(tmp_path: Path) -> None:
    """Four rows per step select up to 4x top-k; scratch takes what does not fit 2x."""
    measures = run(tmp_path, "policy,hot.min=2,hot.start=2,hot.max=2")
    assert {one.multiplier for one in measures.samples} == {2.0}
    assert len(finished_calls(measures)) > 20
