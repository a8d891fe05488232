"""Hot buffers of a different size per request, and the scratch blocks, on a running engine."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from conversations import (
    TOPK,
    EngineShape,
    Run,
    apply,
    ask,
    build_engine,
    converse,
    core_of,
    finish,
    make_conversations,
    report,
)
from vllm.v1.core.block_pool import BlockPool

from hisparsed.control.observe import observe
from hisparsed.engine.messages import report_from_wire
from hisparsed.engine.port import ServingCounters
from hisparsed.engine.scratch import lease_scratch, scratch_block_count, scratch_block_ids
from hisparsed.policy.decide import decide
from hisparsed.policy.decisions import Reason
from hisparsed.policy.memory import Memory
from hisparsed.policy.schema import Policy
from hisparsed.policy.signals import AdmissionOrder, AdmissionRules, Lever

pytestmark = pytest.mark.engine

LEAST, MOST = 4, 16
"""Hot blocks of a group: 1x and 4x of 64 rows in blocks of 16."""
SMALL_SLAB = EngineShape(gpu_blocks=420, host_budget_bytes=20 << 20, ack_lag_steps=3)


def conversations() -> list[Any]:
    return make_conversations(count=8, turns=3, first=400, later=60, answer=20, seed=5)


@pytest.fixture(scope="module")
def ample(folder: Path) -> Run:
    engine = build_engine(folder, EngineShape())
    apply(engine, {"offload_target_blocks": 700})
    return converse(engine, conversations())


def held_blocks(engine: Any) -> dict[str, int]:
    """Hot blocks of each request; every index group must have as many."""
    first, *others = core_of(engine).scheduler.hisparsed._hot
    held = {name: len(blocks) for name, blocks in first.req_to_blocks.items() if blocks}
    for manager in others:
        assert held == {name: len(own) for name, own in manager.req_to_blocks.items() if own}
    return held


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1])
def test_leases_changed_at_random_give_the_same_tokens(folder: Path, ample: Run, seed: int) -> None:
    engine = build_engine(folder, SMALL_SLAB)
    apply(engine, {"offload_target_blocks": 400, "multiplier": 2.0})
    rng = random.Random(seed)
    sizes: set[int] = set()
    moves = 0

    def between_steps(step: int) -> None:
        nonlocal moves
        held = held_blocks(engine)
        assert all(LEAST <= blocks <= MOST for blocks in held.values())
        sizes.update(held.values())
        if step % 3:
            return
        told = report(engine)
        choice = rng.random()
        if choice < 0.1:
            command: dict[str, Any] = {"hot_leases": {}}
        elif choice < 0.2:
            command = {"multiplier": rng.choice([1.5, 2.0, 3.0])}
        else:
            command = {"hot_leases": random_leases(rng, told), "watermark": 200}
        apply(engine, command)
        moves += 1
        for name, blocks in command.get("hot_leases", {}).items():
            assert held_blocks(engine).get(name, 0) <= blocks, "what is too much goes at once"

    moved = converse(engine, conversations(), between_steps)
    assert moved.answers == ample.answers
    assert moves > 30
    assert len(sizes) > 8, "sizes must really have differed"
    assert moved.last_report["hot"]["individual_leases"] == 0, "nobody runs any more"


def random_leases(rng: random.Random, told: dict[str, Any]) -> dict[str, int]:
    names = [one["request_id"] for one in told["requests_hot"]]
    leases = dict.fromkeys(names, LEAST)
    left = (told["hot"]["lease_blocks"] - LEAST) * len(names)
    for name in rng.sample(names, len(names)):
        more = min(left, rng.randrange(MOST - LEAST + 1))
        leases[name] += more
        left -= more
    return {**leases, "ended": told["hot"]["lease_blocks"]}


def decoding(folder: Path, *, short: int = 6, long: int = 4) -> Any:
    """Requests of unequal need. Their prompts were here before, so they begin on the host."""
    engine = build_engine(folder, EngineShape(gpu_blocks=1500))
    apply(engine, {"offload_target_blocks": 400, "multiplier": 1.25})
    core_of(engine).model_executor._hot._curves._fresh_for_s = 0.0
    rng = random.Random(2)
    prompts = [
        [rng.randrange(32, 127) for _ in range(size)] for size in [900] * long + [80] * short
    ]
    for name, answer in (("before", 1), ("now", 300)):
        finish(engine)
        for index, prompt in enumerate(prompts):
            ask(engine, f"{name}-{index}", prompt, answer)
    while len(report(engine)["requests_hot"]) < short + long:
        engine.step()
    return engine


class Shared:
    """A policy over an engine in this process: one tick of a second every eight steps."""

    def __init__(self, engine: Any, sharing: str) -> None:
        self.engine, self.memory = engine, Memory()
        self.policy = Policy.model_validate(
            {
                "version": 1,
                "hot": {"sharing": sharing, "window_shrink": "2s", "min": 1.0, "max": 4.0},
            }
        )
        self.decisions: list[Any] = []

    def run(self, steps: int) -> int:
        """Rows that were loaded meanwhile."""
        before = report(self.engine)["hot"]["loads_total"]
        for step in range(steps):
            if step % 8 == 0:
                self._tick()
            self.engine.step()
        return int(report(self.engine)["hot"]["loads_total"] - before)

    def _tick(self) -> None:
        tick = len(self.decisions) + 1
        snapshot = observe(
            report_from_wire(report(self.engine)),
            ServingCounters(),
            at_s=float(tick),
            report_age_s=0.0,
            tick=tick,
            policy_generation=1,
            last_admission=AdmissionRules(AdmissionOrder.ARRIVAL, 30.0, 12, None, 1.0),
        )
        decision, self.memory = decide(self.policy, snapshot, self.memory)
        self.decisions.append(decision)
        leases = decision.commands.hot_leases
        if leases is not None:
            apply(self.engine, {"hot_leases": leases})

    def reasons(self) -> set[Reason]:
        return {decision.of(Lever.MULTIPLIER).reason for decision in self.decisions}


@pytest.mark.long
def test_sharing_by_gain_loads_far_fewer_rows_than_even_shares(folder: Path) -> None:
    """Six short requests need little of their buffers; four long ones miss without more."""
    even, shared = Shared(decoding(folder), "even"), Shared(decoding(folder), "marginal-gain")
    assert even.run(100) > 0
    shared.run(100)
    assert Reason.SHARED_BY_GAIN in shared.reasons()
    assert Reason.SHARED_BY_GAIN not in even.reasons()
    assert shared.run(150) < 0.6 * even.run(150)
    assert sum(held_blocks(shared.engine).values()) <= sum(held_blocks(even.engine).values())
    hot = report(shared.engine)["hot"]
    assert hot["individual_leases"] >= 4
    apply(shared.engine, {"hot_leases": {}})
    assert report(shared.engine)["hot"]["individual_leases"] == 0
    shared.engine.step()
    assert set(held_blocks(shared.engine).values()) == {hot["lease_blocks"]}


@pytest.fixture(scope="module")
def running(folder: Path) -> Any:
    return decoding(folder, short=2, long=1)


def named(engine: Any) -> list[str]:
    return sorted(one["request_id"] for one in report(engine)["requests_hot"])


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        ((3, 5, 5), "3 blocks for request now-0.*has 4 to 16 blocks"),
        ((17, 4, 4), "17 blocks for request now-0"),
        ((6, 5, 5), "16 blocks for 3 requests, more than the 15 .*5 each"),
    ],
)
def test_leases_that_the_node_cannot_give_are_refused_whole(
    running: Any, blocks: tuple[int, ...], words: str
) -> None:
    before = held_blocks(running)
    leases = dict(zip(named(running), blocks, strict=True))
    with pytest.raises(ValueError, match=words):
        apply(running, {"hot_leases": leases, "offload_target_blocks": 7})
    assert held_blocks(running) == before
    assert report(running)["offload"]["target_blocks"] == 400


def test_a_new_multiplier_ends_leases_of_their_own(running: Any) -> None:
    first, second, third = named(running)
    apply(running, {"hot_leases": {first: 7, second: 4, third: 4}})
    assert report(running)["hot"]["individual_leases"] == 3
    apply(running, {"hot_leases": {second: 5, third: 5, "ended": 4}})
    targets = {one["request_id"]: one["target_blocks"] for one in report(running)["requests_hot"]}
    assert targets == {first: 7, second: 5, third: 5}, "who is not named keeps its own"
    apply(running, {"multiplier": 1.25})
    assert report(running)["hot"]["individual_leases"] == 0
    assert set(held_blocks(running).values()) == {5, 4}, "smaller at once, larger as it runs"
    running.step()
    assert set(held_blocks(running).values()) == {5}


def test_a_curve_is_in_whole_blocks_of_legal_leases_and_falls(running: Any) -> None:
    apply(running, {"multiplier": 1.25, "hot_leases": {}})
    for _ in range(60):
        running.step()
    curves = [one["curve"] for one in report(running)["requests_hot"]]
    assert all(curves)
    for curve in curves:
        blocks = [point["blocks"] for point in curve]
        misses = [point["misses_per_step"] for point in curve]
        assert blocks == sorted(set(blocks))
        assert (blocks[0], blocks[-1] <= MOST, len(blocks) <= 12) == (LEAST, True, True)
        assert misses == sorted(misses, reverse=True)


def pool_of(blocks: int) -> Any:
    return BlockPool(num_gpu_blocks=blocks, enable_caching=True, hash_block_size=16)


def count_for(query_len: int, max_num_seqs: int) -> int:
    return scratch_block_count(
        query_len=query_len, topk=64, block_tokens=16, max_num_seqs=max_num_seqs
    )


def test_one_row_a_request_needs_no_scratch() -> None:
    assert count_for(query_len=1, max_num_seqs=64) == 0


def test_scratch_holds_the_worst_spills_of_four_requests_or_of_all() -> None:
    assert count_for(query_len=4, max_num_seqs=64) == 4 * 3 * 64 // 16
    assert count_for(query_len=4, max_num_seqs=2) == 2 * 3 * 64 // 16


def test_pool_is_smaller_but_empty_after_the_lease() -> None:
    pool = pool_of(50)
    lease_scratch(pool, 10)
    assert pool.get_num_free_blocks() == 39
    assert pool.get_usage() == 0.0
    assert pool.reset_prefix_cache()
    given = {block.block_id for block in pool.get_new_blocks(39)}
    assert given == set(range(1, 50)) - set(scratch_block_ids(10))


def test_a_pool_that_gave_blocks_before_is_refused() -> None:
    pool = pool_of(50)
    pool.get_new_blocks(1)
    with pytest.raises(RuntimeError, match="must be the first 10 of the GPU pool, which gave 2"):
        lease_scratch(pool, 10)


@pytest.fixture(scope="module")
def speculating_engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return build_engine(tmp_path_factory.mktemp("engine"), EngineShape(speculative_tokens=3))


def test_report_counts_the_scratch_and_the_least_lease(speculating_engine: Any) -> None:
    told = report(speculating_engine)
    geometry = told["geometry"]
    assert told["hot"]["scratch_blocks"] == 48
    assert geometry["min_lease_rows"] == TOPK
    assert geometry["decode_query_len"] == 4
    assert told["gpu"]["free_blocks"] == geometry["gpu_blocks_total"] - 1 - 48


def test_least_multiplier_is_one_topk_for_all_rows_of_a_step(speculating_engine: Any) -> None:
    assert apply(speculating_engine, {"multiplier": 1.0})["lease_blocks"] == TOPK // 16
    with pytest.raises(ValueError, match=r"below 64 hot rows.*at least 1"):
        apply(speculating_engine, {"multiplier": 0.96})


def test_an_idle_engine_can_reset_its_prefix_cache(speculating_engine: Any) -> None:
    assert core_of(speculating_engine).scheduler.kv_cache_manager.block_pool.reset_prefix_cache()
