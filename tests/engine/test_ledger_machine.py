"""The ledger under random fire: vLLM's own scheduler, pools, coordinator and offloading manager,
with blocks lent and recalled at any moment and transfers that end whenever they like.

``HISPARSED_FUZZ_EXAMPLES`` sets how many runs are made (default 15).
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from typing import Any

import pytest
from conversations import build_engine, text
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine
from scripted_workers import SMALL_NODE, ScriptedWorkers

from hisparsed.engine.plugin import control

pytestmark = pytest.mark.engine

SHAPE = replace(SMALL_NODE, gpu_blocks=90)
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
        self.apply(multiplier=multiplier, admission={"order": order, "max_running": limit})

    def apply(self, **command: Any) -> None:
        SEEN["moves"] += 1
        control(self.workers.core, "apply", command)
        SEEN["drained"] += self.host.ledger.counts().draining

    @rule(seed=dice)
    def report(self, seed: int) -> None:
        self.traffic(seed)
        report = control(self.workers.core, "report", {})
        assert report["violations"] == []

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
            admission={},
        )
        self.workers.run()
        control(self.workers.core, "report", {})
        assert self.workers.unfinished == []
        assert self.workers.scheduler.reset_prefix_cache(False, True)
        self.workers.run()
        self.workers.check()
        assert self.picture() == self.at_start


def test_the_ledger_stays_sound_under_random_fire(tmp_path: Any) -> None:
    Fire.engine = build_engine(tmp_path, SHAPE)
    run_machine(
        Fire,
        settings=settings(
            derandomize=True,
            deadline=None,
            database=None,
            max_examples=int(os.environ.get("HISPARSED_FUZZ_EXAMPLES", "15")),
            stateful_step_count=40,
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        ),
    )
    unseen = [name for name, count in SEEN.items() if not count]
    assert not unseen, f"the fire never caused {unseen}: {SEEN}"
