"""Races around moving blocks, on vLLM's own scheduler, pools, coordinator and offloading manager.

Each race has one guard: docs/architecture.md names it, and the test fails without it. Then random
fire: blocks are lent and recalled at any moment and transfers end whenever they like.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import put_off_loads
import pytest
from conversations import (
    EngineShape,
    apply,
    at_most,
    build_engine,
    converse,
    core_of,
    make_conversations,
    report,
    text,
)
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine
from scripted_workers import SMALL_NODE, ScriptedWorkers

from hisparsed.engine.plugin import control
from tests.examples import examples

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return build_engine(tmp_path_factory.mktemp("races"), SMALL_NODE)


@pytest.fixture
def workers(engine: Any) -> Iterator[ScriptedWorkers]:
    workers = ScriptedWorkers(engine)
    yield workers
    workers.hold_offload = False
    for request_id in workers.unfinished:
        workers.cancel(request_id)
    workers.run()
    workers.host.ledger.give_back(workers.host.ledger.budget)
    apply(engine, {"offload_target_blocks": 0, "reserve_target_blocks": 0, **at_most(99)})
    assert workers.scheduler.reset_prefix_cache(False, True)
    workers.run()
    workers.check()


def forget_gpu_pages(workers: ScriptedWorkers) -> None:
    assert workers.scheduler.kv_cache_manager.block_pool.reset_prefix_cache()


@contextmanager
def kept_by_somebody(workers: ScriptedWorkers, free: int) -> Iterator[None]:
    """All but ``free`` of HiSparse's blocks are held for longer than a call."""
    pool = workers.host.pool
    blocks = pool.get_new_blocks(pool.get_num_free_blocks() - free)
    try:
        yield
    finally:
        pool.free_blocks(blocks)


def with_a_store_in_flight(workers: ScriptedWorkers) -> str:
    request_id = workers.admit(text(120, seed=1), 3)
    workers.hold_offload = True
    while not workers.jobs:
        workers.step()
    return request_id


def test_a_shrink_between_lookup_and_load_waits_for_the_end_of_the_pass(
    engine: Any, workers: ScriptedWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply(engine, {"offload_target_blocks": 40})
    workers.admit(text(200, seed=1), 2)
    workers.run()
    forget_gpu_pages(workers)
    offload, look_up = workers.host.offload, workers.host.offload.prefix
    shrunk = []

    def look_up_then_shrink(*arguments: Any) -> Any:
        result = look_up(*arguments)
        if result and not shrunk:
            shrunk.append(apply(engine, {"offload_target_blocks": 0})["lent_blocks"])
        return result

    monkeypatch.setattr(offload, "prefix", look_up_then_shrink)
    workers.admit(text(200, seed=1), 2)
    workers.hold_offload = True
    workers.step()
    (job,) = workers.jobs.values()
    assert job.is_load
    assert shrunk == [40], "nothing moves inside the pass"
    workers.step()
    assert workers.host.ledger.counts().draining == len(job.host_blocks)
    workers.check()
    workers.hold_offload = False
    workers.run()
    assert workers.host.ledger.counts().lent == 0


@pytest.mark.parametrize("case", put_off_loads.CASES, ids=lambda case: case.__name__)
def test_what_comes_between_a_lookup_and_a_load_that_was_put_off(
    case: Any, engine: Any, workers: ScriptedWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM puts loads off since 0.33, to a later step; `test_two_steps.py` runs it."""
    put_off_loads.put_loads_off(workers.scheduler, partial(monkeypatch.setattr, raising=False))
    loaded = put_off_loads.run_case(case, engine, workers)
    assert loaded == (0 if case in (put_off_loads.reset, put_off_loads.abort) else 192)


def test_a_recall_while_a_store_is_in_flight_leaves_the_block_until_it_ends(
    engine: Any, workers: ScriptedWorkers
) -> None:
    apply(engine, {"offload_target_blocks": 30})
    with_a_store_in_flight(workers)
    storing = {block for job in workers.jobs.values() for block in job.host_blocks}
    apply(engine, {"offload_target_blocks": 0})
    assert report(engine)["draining_blocks"] == len(storing)
    workers.check()
    workers.hold_offload = False
    workers.run()
    assert report(engine)["offload"]["lent_blocks"] == 0


def test_blocks_come_back_at_once_when_nothing_runs_for_want_of_them(
    engine: Any, workers: ScriptedWorkers
) -> None:
    budget = report(engine)["geometry"]["budget_blocks"]
    apply(engine, {"reserve_target_blocks": 5})
    apply(engine, {"offload_target_blocks": budget})
    lent = report(engine)["offload"]["lent_blocks"]
    with kept_by_somebody(workers, free=3):
        workers.admit(text(200, seed=2), 2)
        workers.step()
        host = report(engine)
        assert host["ledger"]["given_back_blocks_total"] > 0
        assert host["offload"]["lent_blocks"] == host["offload"]["target_blocks"] < lent
        assert host["reserve"]["blocks"] == 5, "lent blocks go first"
        workers.run(steps=20)
    assert workers.unfinished == []


def test_nothing_is_given_back_while_the_engine_is_paused(
    engine: Any, workers: ScriptedWorkers
) -> None:
    from vllm.v1.core.sched.interface import PauseState

    apply(engine, {"offload_target_blocks": 1000})
    lent = report(engine)["offload"]["lent_blocks"]
    with kept_by_somebody(workers, free=3):
        workers.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        workers.admit(text(200, seed=2), 2)
        workers.step()
        assert report(engine)["offload"]["lent_blocks"] == lent
        workers.scheduler.set_pause_state(PauseState.UNPAUSED)
        workers.step()
        assert report(engine)["offload"]["lent_blocks"] < lent
        workers.run(steps=20)


def test_calls_that_wait_for_each_others_blocks_do_not_wait_for_ever(tmp_path: Path) -> None:
    engine = build_engine(tmp_path, replace(SMALL_NODE, gpu_blocks=90))
    workers = ScriptedWorkers(engine)
    apply(engine, {"offload_target_blocks": 40})
    for seed, kept in ((1, 81), (2, 113)):
        workers.admit(text(kept, seed=seed), 1)
        workers.run()
    forget_gpu_pages(workers)
    workers.hold_offload = True
    for seed, length in ((1, 200), (2, 127)):
        workers.admit(text(length, seed=seed), 2)
    for _ in range(4):
        workers.step()
    assert len(workers.scheduler.kv_holding_waiting) == 2
    pool = workers.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() < 12, "neither can go on while the other holds its blocks"
    workers.hold_offload = False
    workers.run(steps=30)
    assert workers.unfinished == []
    workers.check()


def test_a_full_tier_stores_nothing_more_and_nothing_fails(
    engine: Any, workers: ScriptedWorkers
) -> None:
    apply(engine, {"offload_target_blocks": 1})
    with_a_store_in_flight(workers)
    for seed in range(4):
        workers.admit(text(120, seed=10 + seed), 4)
    for _ in range(60):
        if not workers.unfinished:
            break
        workers.step()
    assert workers.unfinished == []
    assert report(engine)["offload"]["stored_chunks"] <= workers.host.ledger.layout.chunks_per_block
    workers.check()


def test_a_reset_works_while_blocks_are_lent_and_drops_their_idle_chunks(
    engine: Any, workers: ScriptedWorkers
) -> None:
    apply(engine, {"offload_target_blocks": 30, "reserve_target_blocks": 10})
    workers.admit(text(150, seed=3), 2)
    workers.run()
    before = report(engine)
    assert before["offload"]["stored_chunks"] > 0
    assert before["hisparse"]["cached_blocks"] > 0
    assert workers.scheduler.reset_prefix_cache()
    host = report(engine)
    assert (host["offload"]["lent_blocks"], host["reserve"]["blocks"]) == (30, 10)
    assert (host["offload"]["stored_chunks"], host["hisparse"]["cached_blocks"]) == (0, 0)


def test_a_reset_is_refused_while_a_request_holds_blocks(
    engine: Any, workers: ScriptedWorkers
) -> None:
    apply(engine, {"offload_target_blocks": 30})
    workers.admit(text(150, seed=3), 20)
    workers.step()
    assert not workers.scheduler.reset_prefix_cache()
    workers.check()


def test_after_a_reset_slots_with_a_transfer_in_flight_settle_before_they_move(
    engine: Any, workers: ScriptedWorkers
) -> None:
    apply(engine, {"offload_target_blocks": 30})
    workers.cancel(with_a_store_in_flight(workers))
    for _ in range(3):
        workers.step()
    assert workers.jobs, "nothing but the store is left to do"
    storing = {block for job in workers.jobs.values() for block in job.host_blocks}
    workers.scheduler.reset_prefix_cache(False, True)
    workers.check()
    apply(engine, {"offload_target_blocks": 0})
    host = report(engine)
    assert host["draining_blocks"] == host["offload"]["lent_blocks"] == len(storing)
    workers.check()
    assert workers.is_busy(), "an idle engine has to step once more, for the flush"
    workers.run()
    assert report(engine)["offload"]["lent_blocks"] == 0


def test_a_second_reset_before_the_first_one_is_flushed_is_the_same_reset(
    engine: Any, workers: ScriptedWorkers
) -> None:
    apply(engine, {"offload_target_blocks": 30})
    workers.cancel(with_a_store_in_flight(workers))
    for _ in range(3):
        workers.step()
    assert workers.jobs
    before = workers.host.offload.resets
    assert workers.scheduler.reset_prefix_cache(False, True)
    assert workers.scheduler.reset_prefix_cache(False, True)
    assert workers.host.offload.resets == before + 1
    workers.step()
    assert workers.host.offload.settling_slots == 0
    assert workers.scheduler.reset_prefix_cache(False, True)
    assert workers.host.offload.resets == before + 2
    workers.check()


def test_a_call_larger_than_what_is_left_waits_and_is_served(
    engine: Any, workers: ScriptedWorkers
) -> None:
    told = report(engine)
    floor = told["hisparse"]["floor_blocks"]
    apply(engine, {"offload_target_blocks": told["geometry"]["budget_blocks"]})
    first = workers.admit(text(200, seed=4), 30)
    workers.step()
    second = workers.admit(text(220, seed=5), 3)
    waited = 0
    while first in workers.unfinished:
        workers.step()
        waited += workers.scheduler.requests[second].num_computed_tokens == 0
        counts = workers.host.ledger.counts()
        assert counts.hisparse_capacity >= floor
    assert waited > 5
    workers.run(steps=40)
    assert workers.unfinished == []


def test_a_call_larger_than_the_node_can_ever_hold_is_refused(engine: Any) -> None:
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match=r"256 tokens.* contains 300 input tokens"):
        engine.add_request("large", {"prompt_token_ids": text(300, seed=6)}, SamplingParams())


def test_lent_blocks_are_not_in_use_to_vllms_gauges(engine: Any, workers: ScriptedWorkers) -> None:
    apply(engine, {"offload_target_blocks": 60, "reserve_target_blocks": 10})
    assert workers.host.pool.get_usage() == 0.0
    workers.admit(text(64, seed=7), 20)
    workers.step()
    counts = workers.host.ledger.counts()
    hisparse = workers.scheduler.connector._connectors[0]
    (usage,) = hisparse.get_kv_connector_stats().data["host_cache_usage_perc"]
    assert usage == pytest.approx(counts.hisparse_in_use / counts.hisparse_capacity)
    assert 0 < usage < 1


@pytest.mark.long
@pytest.mark.examples
def test_resets_and_moves_at_random_change_no_token(tmp_path: Path) -> None:
    shape = EngineShape(gpu_blocks=420, host_budget_bytes=20 << 20, ack_lag_steps=3)

    def talk(between: Any) -> Any:
        engine = build_engine(tmp_path, shape)
        apply(engine, {"offload_target_blocks": 300})
        conversations = make_conversations(
            count=examples(4, 6), turns=3, first=300, later=60, answer=16, seed=5
        )
        return converse(engine, conversations, lambda step: between(engine, step)).answers

    rng = random.Random(0)
    resets = []

    def disturb(engine: Any, step: int) -> None:
        if step % 4 == 0:
            blocks = rng.randrange(900)
            apply(engine, {"offload_target_blocks": blocks, "reserve_target_blocks": blocks // 9})
        if step % 7 == 3:
            try:
                core_of(engine).reset_prefix_cache(rng.random() < 0.5, rng.random() < 0.5)
                resets.append(step)
            except RuntimeError as refusal:
                assert "Failed to reset KV cache" in str(refusal)
        assert core_of(engine).scheduler.hisparsed.host.watch.look_at_everything() == []

    assert talk(disturb) == talk(lambda engine, step: None)
    assert len(resets) > 5


SHAPE = replace(SMALL_NODE, gpu_blocks=90)


def rules(order: str, running: int) -> dict[str, Any]:
    return {"order": order, "ageing_s": 30.0, "max_running": running}


SEEN = {"preempted": 0, "moves": 0, "resets": 0, "drained": 0, "loads": 0, "steps": 0}
dice = st.integers(0, 1 << 16)


class Fire(RuleBasedStateMachine):
    engine: Any = None

    @initialize()
    def begin(self) -> None:
        self.workers = ScriptedWorkers(self.engine)
        self.host = self.workers.host
        self.at_start = self.picture()
        self.apply(offload_target_blocks=self.host.ledger.budget // 4)
        self.prompts = [text(256, seed) for seed in range(9)]

    def picture(self) -> Any:
        return (
            self.host.ledger.counts(),
            self.host.pool.idle_cached_blocks,
            self.workers.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        )

    @rule(seed=dice)
    def only_traffic(self, seed: int) -> None:
        self.traffic(seed)

    def traffic(self, seed: int) -> None:
        """Calls arrive and the engine steps; transfers end at once, late, or not at all."""
        rng = random.Random(seed)
        for _ in range(rng.randrange(4)):
            if len(self.workers.unfinished) < 12:
                prompt = rng.choice(self.prompts)[: rng.choice([rng.randrange(8, 220), 200])]
                self.workers.admit(prompt, rng.randrange(1, 30))
        share = rng.choice([0.0, 0.1, 0.5, 1.0, 1.0])
        for _ in range(rng.randrange(25)):
            if not self.workers.is_busy():
                return
            SEEN["steps"] += 1
            self.workers.step(share, rng)
            self.workers.check()
            SEEN["loads"] += sum(job.is_load for job in self.workers.jobs.values())

    @rule(seed=dice)
    def cancel(self, seed: int) -> None:
        self.traffic(seed)
        if self.workers.unfinished:
            self.workers.cancel(random.Random(seed).choice(self.workers.unfinished))

    @rule(share=st.sampled_from([0.0, 0.02, 0.05]) | st.floats(0, 1), seed=dice)
    def lend_or_recall(self, share: float, seed: int) -> None:
        self.traffic(seed)
        self.apply(offload_target_blocks=round(share * self.host.ledger.budget))

    @rule(share=st.floats(0, 0.6), release=st.booleans(), seed=dice)
    def reserve(self, share: float, release: bool, seed: int) -> None:
        self.traffic(seed)
        self.apply(
            reserve_target_blocks=round(share * self.host.ledger.budget), release_reserve=release
        )

    @rule(
        multiplier=st.sampled_from([1.0, 2.0, 4.0]),
        order=st.sampled_from(["arrival", "held-prefix-first"]),
        limit=st.integers(1, 6),
        seed=dice,
    )
    def other_levers(self, multiplier: float, order: str, limit: int, seed: int) -> None:
        self.traffic(seed)
        self.apply(multiplier=multiplier, admission=rules(order, limit))

    def apply(self, **command: Any) -> None:
        SEEN["moves"] += 1
        control(self.workers.core, "apply", command)
        SEEN["drained"] += self.host.ledger.counts().draining

    @rule(seed=dice)
    def report(self, seed: int) -> None:
        self.traffic(seed)
        report = control(self.workers.core, "report", {})
        assert report["ledger"]["violations"] == []

    @rule(running=st.booleans(), connector=st.booleans(), seed=dice)
    def reset_caches(self, running: bool, connector: bool, seed: int) -> None:
        self.traffic(seed)
        scheduler = self.workers.scheduler
        moving = scheduler.hisparsed.transfers_in_flight() or scheduler.kv_holding_waiting
        try:
            done = scheduler.reset_prefix_cache(running, connector)
        except RuntimeError as refusal:
            # vLLM's answer while transfers or calls that wait hold blocks; nothing is lost by it.
            assert moving, refusal
            return
        SEEN["resets"] += done

    @invariant()
    def the_ledger_is_sound(self) -> None:
        if hasattr(self, "workers"):
            self.workers.check()
            assert self.host.watch.total == 0

    def teardown(self) -> None:
        if not hasattr(self, "workers"):
            return
        SEEN["preempted"] += self.workers.preempted
        self.apply(
            offload_target_blocks=0,
            reserve_target_blocks=0,
            release_reserve=False,
            multiplier=4.0,
            admission=rules("arrival", 6),
        )
        self.workers.run()
        control(self.workers.core, "report", {})
        assert self.workers.unfinished == []
        assert self.workers.scheduler.reset_prefix_cache(False, True)
        self.workers.run()
        self.workers.check()
        assert self.picture() == self.at_start


@pytest.mark.examples
def test_the_ledger_stays_sound_under_random_fire(tmp_path: Any) -> None:
    Fire.engine = build_engine(tmp_path, SHAPE)
    run_machine(
        Fire,
        settings=settings(
            derandomize=True,
            deadline=None,
            database=None,
            max_examples=examples(10, 60),
            stateful_step_count=40,
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        ),
    )
    unseen = [name for name, count in SEEN.items() if not count]
    assert not unseen, f"the fire never caused {unseen}: {SEEN}"
