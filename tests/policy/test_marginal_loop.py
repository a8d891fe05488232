"""Marginal value against two real LRU pools: it finds what equal reach assumes wrongly.

The plant keeps prefixes of sessions in a HiSparse pool and an offload pool, evicts by LRU,
and tells ghost lists. ``slots_a_chunk`` is what a chunk really takes: above 1, something that
the geometry does not know of, such as another cache group, lives in the offload pool too.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections import OrderedDict
from functools import cache
from typing import Any

import pytest

from hisparsed.engine.ghost_list import GhostList, PrefixGhosts
from hisparsed.policy.decide import decide
from hisparsed.policy.memory import Memory
from hisparsed.policy.reasons import Lever, Reason
from hisparsed.policy.schema import Policy
from hisparsed.policy.signals import GhostPoint, HiSparsePool, OffloadPool, Prefix, Tokens

BUDGET, CHUNKS, BLOCK_TOKENS = 400, 18, 64
SESSIONS, BLOCKS_A_SESSION, CALLS_A_TICK = 60, 10, 4


@cache
def prefix(session: int) -> tuple[bytes, ...]:
    return tuple(
        hashlib.sha256(f"{session}.{index}".encode()).digest() for index in range(BLOCKS_A_SESSION)
    )


class LruPool:
    def __init__(self, ghosts: GhostList) -> None:
        self.ghosts = ghosts
        self.blocks: OrderedDict[bytes, None] = OrderedDict()

    def use(self, chain: tuple[bytes, ...], capacity: int) -> None:
        for block in reversed(chain):
            self.blocks[block] = None
            self.blocks.move_to_end(block)
            self.ghosts.restored(block)
        while len(self.blocks) > capacity:
            gone, _ = self.blocks.popitem(last=False)
            self.ghosts.evicted(gone)


class CacheNode:
    """One tick a second; targets are followed at once."""

    def __init__(self, kit: Any, lent: int, strategy: str, slots_a_chunk: float) -> None:
        self.kit, self.slots_a_chunk = kit, slots_a_chunk
        self.policy = Policy.model_validate(
            {
                "version": 1,
                "pools": {"offload": {"ceiling": "60%"}, "hisparse": {"floor": "20%"}},
                "rebalance": {
                    "strategy": strategy,
                    "window": "60s",
                    "cool_down": "10s",
                    "cool_down_towards_safety": "2s",
                    "hold_off": "60s",
                    "step": "2%",
                    "step_towards_safety": "10%",
                },
            }
        )
        self.geometry = dataclasses.replace(
            kit.geometry, budget_blocks=BUDGET, max_model_len=1_024, chunks_per_host_block=CHUNKS
        )
        self.ghosts = PrefixGhosts(
            GhostList(4_096, 1.0),
            GhostList(4_096, 1.0, CHUNKS / slots_a_chunk),
            64,
            (4, 8, 32, 76, 152),
        )
        self.hisparse, self.offload = LruPool(self.ghosts.hisparse), LruPool(self.ghosts.offload)
        self.lent, self.at_s, self.hides_ghosts = lent, 0, False
        self.rng, self.memory = random.Random(4), Memory()
        self.hits = self.asked = 0
        self.targets: list[int] = []
        self.decisions: list[Any] = []

    def run(self, ticks: int) -> float:
        """The share of prefix tokens that was served."""
        hits, asked = self.hits, self.asked
        for _ in range(ticks):
            for _ in range(CALLS_A_TICK):
                self._call(self.rng.randrange(SESSIONS))
            decision, self.memory = decide(self.policy, self._snapshot(), self.memory)
            self.decisions.append(decision)
            if decision.commands.offload_target_blocks is not None:
                self.lent = decision.commands.offload_target_blocks
            self.targets.append(self.lent)
            self.at_s += 1
        return (self.hits - hits) / (self.asked - asked)

    def moves(self) -> list[Any]:
        split = (decision.of(Lever.SPLIT) for decision in self.decisions)
        return [one for one in split if one.acts]

    def _call(self, session: int) -> None:
        chain = prefix(session)
        self.ghosts.looked_up(
            chain, self.hisparse.blocks.__contains__, self.offload.blocks.__contains__
        )
        served = 0
        for block in chain:
            if block not in self.hisparse.blocks or block not in self.offload.blocks:
                break
            served += 1
        self.hits += served * BLOCK_TOKENS
        self.asked += len(chain) * BLOCK_TOKENS
        self.hisparse.use(chain, BUDGET - self.lent)
        self.offload.use(chain, int(self.lent * CHUNKS / self.slots_a_chunk))

    def _snapshot(self) -> Any:
        lent, hisparse = self.lent, BUDGET - self.lent

        def points(found: Any) -> tuple[GhostPoint, ...]:
            if self.hides_ghosts:
                return ()
            return tuple(GhostPoint(one.extra_blocks, one.tokens) for one in found)

        return dataclasses.replace(
            self.kit.idle_snapshot(self.geometry, lent),
            at_s=float(self.at_s),
            tick=self.at_s,
            hisparse=HiSparsePool(
                hisparse, hisparse, 0, hisparse, 0, points(self.ghosts.hisparse_points())
            ),
            offload=OffloadPool(
                lent * CHUNKS, lent, lent, 0, lent * CHUNKS, points(self.ghosts.offload_points())
            ),
            requests=dataclasses.replace(self.kit.idle_snapshot().requests, running=4, full=4),
            prefix=Prefix(self.hits, self.asked),
            tokens=Tokens(self.asked, 0),
        )


def node(kit: Any, lent: int = 28, strategy: str = "marginal-value", slots: float = 4.0):
    return CacheNode(kit, lent, strategy, slots)


def served_at(kit: Any, lent: int, slots: float) -> float:
    """The share served at a fixed split."""
    plant = node(kit, lent, "equal-reach", slots)
    plant.policy = Policy.model_validate({"version": 1, "mode": "off"})
    plant.run(150)
    return plant.run(300)


def test_it_finds_what_the_geometry_does_not_know(kit) -> None:
    """Chunks take four times their size: equal reach of declared bytes serves little."""
    plain, measured = node(kit, strategy="equal-reach"), node(kit)
    plain.run(700)
    measured.run(700)
    best = max(served_at(kit, lent, 4.0) for lent in (68, 76, 84))
    assert plain.run(300) < 0.5 * best
    assert measured.run(300) > 0.9 * best
    assert {one.reason for one in measured.moves()} == {Reason.OFFLOAD_WORTH_MORE}


def test_once_there_it_stays(kit) -> None:
    plant = node(kit)
    plant.run(700)
    settled = len(plant.moves())
    plant.run(1_500)
    assert settled > 3
    assert len(plant.moves()) - settled <= 1


def test_the_direction_flips_when_the_load_flips(kit) -> None:
    plant = node(kit)
    plant.run(700)
    high = plant.targets[-1]
    plant.slots_a_chunk = 1.0
    plant.run(900)
    down = [one.reason for one in plant.moves() if one.wanted < one.current]
    assert plant.targets[-1] < high / 2
    assert set(down) == {Reason.HISPARSE_WORTH_MORE}
    assert plant.run(300) > 0.95 * served_at(kit, 28, 1.0)


@pytest.mark.parametrize("slots", [1.0, 4.0])
def test_it_never_goes_below_equal_reach(kit, slots: float) -> None:
    """Without margin 22 blocks are equal reach here, and two of dead band are kept above."""
    plant = node(kit, lent=60, slots=slots)
    plant.run(900)
    assert min(plant.targets) >= 22 + 2


def test_without_ghost_lists_equal_reach_stands(kit) -> None:
    plant = node(kit)
    plant.hides_ghosts = True
    plant.run(300)
    split = plant.decisions[-1].of(Lever.SPLIT)
    assert (split.reason, plant.targets[-1]) == (Reason.IN_DEAD_BAND, 28)
    assert "does not measure" in split.sentence


def test_every_move_says_what_it_expects_and_is_judged(kit) -> None:
    plant = node(kit)
    plant.run(700)
    assert all("that should save" in one.sentence for one in plant.moves())
    judged = [
        decision.of(Lever.SPLIT)
        for decision in plant.decisions
        if "was to bring" in decision.of(Lever.SPLIT).sentence
    ]
    assert len(judged) == len(plant.moves())
    last = plant.decisions[-1].of(Lever.SPLIT).figures
    assert last["expected_saved_tokens_per_minute"] > 0
    assert "realised_saved_tokens_per_minute" in last
    assert 0.5 < last["effective_moves_ratio"] <= 1


def test_the_same_calls_give_the_same_decisions(kit) -> None:
    first, second = node(kit), node(kit)
    first.run(400)
    second.run(400)
    assert first.decisions == second.decisions
