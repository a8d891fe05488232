"""Ghost lists on vLLM's own pools: what they foretell is what larger pools serve."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conversations import EngineShape, apply, ask, build_engine, core_of, finish, report

from hisparsed.control.observe import observe
from hisparsed.engine.host.ghosts import MAX_ENTRIES, sample_rate, slack_edges, step_edges
from hisparsed.engine.messages import report_from_wire
from hisparsed.engine.port import ServingCounters
from hisparsed.policy.decide import decide
from hisparsed.policy.decisions import Reason
from hisparsed.policy.memory import Memory
from hisparsed.policy.schema import Policy
from hisparsed.policy.signals import AdmissionOrder, AdmissionRules, Lever

pytestmark = pytest.mark.engine

HOST_BLOCK_BYTES = 16_384
PREFIX_TOKENS, CALLS = 112, 140


class Node:
    """An engine that serves one call after the other, with pools of given sizes."""

    def __init__(self, folder: Path, *, hisparse: int, lent: int, gpu_blocks: int = 84) -> None:
        shape = EngineShape(
            gpu_blocks=gpu_blocks,
            host_budget_bytes=(hisparse + lent + 1) * HOST_BLOCK_BYTES,
            max_num_seqs=2,
            max_model_len=256,
        )
        self.engine = build_engine(folder, shape)
        self.hit_tokens = self.calls = 0
        self.after_call: Callable[[], None] = lambda: None
        command = {"offload_target_blocks": lent, "multiplier": 1.0}
        assert apply(self.engine, command)["lent_blocks"] == lent

    def serve(self, sessions: int, calls: int = CALLS, lately: float = 0.5) -> None:
        """``lately``: share of calls of sessions that were here a few calls ago."""
        rng = random.Random(11)
        texts = [[rng.randrange(32, 127) for _ in range(PREFIX_TOKENS)] for _ in range(sessions)]
        recent: list[int] = []
        for _ in range(calls):
            again = recent and rng.random() < lately
            recent.append(rng.choice(recent[-6:]) if again else rng.randrange(sessions))
            self._call([*texts[recent[-1]], 40, 41, 42, 43])
            self.after_call()

    def _call(self, tokens: list[int]) -> None:
        self.calls += 1
        ask(self.engine, "call", tokens, 2)
        self.hit_tokens += finish(self.engine)["call"].num_cached_tokens or 0

    def ghosts(self, pool: str) -> dict[int, int]:
        points = report(self.engine)[pool]["ghost"]
        return {point["extra_blocks"]: point["tokens_total"] for point in points}

    @property
    def lists(self) -> Any:
        return core_of(self.engine).scheduler.hisparsed.ghosts._ghosts


@pytest.mark.long
def test_hisparse_ghosts_are_exactly_what_a_larger_pool_serves(tmp_path: Path) -> None:
    small = Node(tmp_path, hisparse=70, lent=26)
    large = Node(tmp_path, hisparse=74, lent=26)
    small.serve(sessions=16)
    large.serve(sessions=16)
    gained = large.hit_tokens - small.hit_tokens
    assert gained > 100
    assert small.ghosts("hisparse")[4] == gained
    assert set(small.ghosts("offload").values()) == {0}, "it holds every prefix"


@pytest.mark.long
def test_offload_ghosts_are_nearly_what_a_larger_pool_serves(tmp_path: Path) -> None:
    """Nearly: chunks are evicted a call's worth at once, and some are on the GPU too."""
    small = Node(tmp_path, hisparse=200, lent=12)
    large = Node(tmp_path, hisparse=200, lent=14)
    small.serve(sessions=24)
    large.serve(sessions=24)
    gained = large.hit_tokens - small.hit_tokens
    assert gained > 300
    assert small.ghosts("offload")[2] == pytest.approx(gained, rel=0.2)
    assert set(small.ghosts("hisparse").values()) == {0}, "it holds every prefix"


def test_what_lending_and_recalling_take_are_ghosts_and_a_reset_forgets_them(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path, hisparse=50, lent=10)
    node.serve(sessions=5, calls=12)
    lists = node.lists
    assert (len(lists.hisparse), len(lists.offload)) == (0, 0)
    idle = report(node.engine)
    empty = idle["hisparse"]["free_blocks"]
    apply(node.engine, {"offload_target_blocks": 10 + empty + 3})
    assert len(lists.hisparse) == 3
    stored = report(node.engine)["offload"]["stored_chunks"]
    apply(node.engine, {"offload_target_blocks": 0})
    assert len(lists.offload) == stored > 0
    assert node.engine.reset_prefix_cache(reset_connector=True)
    assert (len(lists.hisparse), len(lists.offload)) == (0, 0)


@pytest.mark.parametrize(("budget", "chunks"), [(60, 7), (6_143, 7), (170_000, 18), (170_000, 2)])
def test_edges_are_those_of_common_steps_and_fit_the_lists(budget: int, chunks: int) -> None:
    for share in (0.005, 0.01, 0.02):
        step = max(1, int(share * budget))
        deep = step * (1 + chunks)
        assert step in step_edges(budget)
        assert {step, deep // 2, deep} <= set(slack_edges(budget, chunks))
    rate = sample_rate(budget, chunks)
    assert slack_edges(budget, chunks)[-1] * rate <= MAX_ENTRIES
    assert step_edges(budget)[-1] * chunks * rate <= MAX_ENTRIES
    assert (rate == 1.0) == (budget < 10_000)


class Governed:
    """A policy that decides a node's split after every call; a call takes a second."""

    def __init__(self, node: Node, strategy: str) -> None:
        self.node, self.memory = node, Memory()
        self.policy = Policy.model_validate(
            {
                "version": 1,
                "rebalance": {
                    "strategy": strategy,
                    "window": "40s",
                    "step": "2%",
                    "dead_band": {"relative": "1%", "absolute": 0},
                    "marginal": {"least_gain": 20},
                    "cool_down": "10s",
                    "cool_down_towards_safety": "1s",
                    "hold_off": "1s",
                },
            }
        )
        self.targets: list[int] = []
        self.reasons: set[Reason] = set()
        node.after_call = self._tick

    def _tick(self) -> None:
        node = self.node
        prompt = node.calls * (PREFIX_TOKENS + 4)
        snapshot = observe(
            report_from_wire(report(node.engine)),
            ServingCounters(
                prompt_tokens=prompt, prefix_query_tokens=prompt, prefix_hit_tokens=node.hit_tokens
            ),
            at_s=float(node.calls),
            report_age_s=0.0,
            tick=node.calls,
            policy_generation=1,
            last_admission=AdmissionRules(AdmissionOrder.ARRIVAL, 30.0, 2, None, 1.0),
        )
        decision, self.memory = decide(self.policy, snapshot, self.memory)
        split = decision.of(Lever.SPLIT)
        self.reasons.add(split.reason)
        self.targets.append(int(split.wanted))
        target = decision.commands.offload_target_blocks
        if target is not None:
            apply(node.engine, {"offload_target_blocks": target})


@pytest.mark.long
def test_marginal_value_takes_what_the_offload_pool_does_not_need(tmp_path: Path) -> None:
    """The GPU holds every indexer page here, which equal reach cannot know."""
    governed = {
        strategy: Governed(Node(tmp_path, hisparse=132, lent=26, gpu_blocks=700), strategy)
        for strategy in ("equal-reach", "marginal-value")
    }
    for one in governed.values():
        one.node.serve(sessions=24, calls=160, lately=0.0)
    plain, measured = governed["equal-reach"], governed["marginal-value"]
    assert Reason.HISPARSE_WORTH_MORE in measured.reasons
    assert measured.targets[-1] < plain.targets[-1]
    assert measured.node.hit_tokens > plain.node.hit_tokens
