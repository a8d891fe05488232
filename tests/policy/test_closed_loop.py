"""The policy in closed loops: convergence, calm, direction, and never short for long.

Three plants. One of conftest's blocks, for the split, the multiplier and admission. Two real LRU
pools that hold prefixes of sessions, for marginal value, which finds what equal reach assumes
wrongly. And an over-subscribed queue of 60 sessions with room for 25 prefixes, whose calls are
cheap only while their prefix is held, for ageing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import random
import sys
from collections import OrderedDict
from functools import cache
from typing import Any

import pytest

from hisparsed.engine.admission import OldestTurn, WaitingCall, held_prefix_first
from hisparsed.engine.host.ghost_list import GhostList, PrefixGhosts
from hisparsed.policy.admission import ageing_s
from hisparsed.policy.decide import decide
from hisparsed.policy.decisions import Reason
from hisparsed.policy.memory import Memory, remember
from hisparsed.policy.reach import reach_now
from hisparsed.policy.schema import Policy
from hisparsed.policy.signals import GhostPoint, HiSparsePool, Lever, OffloadPool, Prefix, Tokens

# Tighter than what ships, so that hours fit into few ticks.
TIGHT = {
    "window": "10s",
    "cool_down": "10s",
    "cool_down_towards_safety": "2s",
    "hold_off": "30s",
    "step": "2%",
    "step_towards_safety": "10%",
}


def tight(**rebalance: Any) -> Policy:
    return Policy.model_validate({"version": 1, "rebalance": {**TIGHT, **rebalance}})


def safe(plant: Any, margin: float = 0.2) -> bool:
    reach = reach_now(plant.snapshot)
    return reach.offload_tokens >= reach.hisparse_tokens * (1 + margin)


@pytest.mark.parametrize(
    "lent",
    [
        150,
        5_000,
        *(pytest.param(one, marks=pytest.mark.long) for one in (400, 640, 700, 1_500, 4_000)),
    ],
)
def test_constant_load_converges_and_stays(kit, lent: int) -> None:
    plant = kit.Plant(tight(), lent)
    plant.in_use_blocks = 3_000
    plant.run(400)
    moves = len(plant.moves)
    assert safe(plant)
    plant.run(2_000)
    assert len(plant.moves) - moves <= 1
    assert safe(plant)


def test_safety_is_reached_within_two_moves_and_thrift_takes_its_time(kit) -> None:
    short, beyond = kit.Plant(tight(), 150), kit.Plant(tight(), 1_163)
    short.run(20)
    assert short.moves == [(150, 657)]
    assert safe(short)
    beyond.run(60)
    assert [beyond.targets.index(to) for _, to in beyond.moves] == [10, 20, 30]
    assert beyond.moves[-1][1] == 657


def test_thrift_never_crosses_the_safe_line(kit) -> None:
    plant = kit.Plant(tight(), 5_000)
    plant.in_use_blocks = 2_000
    below = []
    plant.run(600, before=lambda tick: below.append(tick) if not safe(plant) else None)
    assert plant.targets[-1] < 800
    assert below == []


def test_ten_percent_noise_moves_nothing(kit) -> None:
    rng = random.Random(11)
    plant = kit.Plant(tight(), 650)

    def noisy(_: int) -> None:
        plant.in_use_blocks = round(4_000 * rng.uniform(0.9, 1.1))
        plant.tokens_a_tick = round(1_000 * rng.uniform(0.9, 1.1))

    plant.run(100, noisy)
    settled = len(plant.moves)
    plant.run(3_000, noisy)
    assert len(plant.moves) == settled
    assert safe(plant)


def test_direction_flips_when_the_load_flips(kit) -> None:
    """With a wide margin an idle node needs visibly more blocks than a crowded one."""
    plant = kit.Plant(tight(margin="100%"), 1_000)
    plant.in_use_blocks = 0
    plant.run(300)
    idle_target = plant.targets[-1]
    plant.in_use_blocks = 8_000
    plant.run(600)
    crowded_target = plant.targets[-1]
    plant.in_use_blocks = 0
    plant.run(300)
    assert crowded_target < idle_target
    assert plant.targets[-1] > crowded_target
    directions = [to > start for start, to in plant.moves]
    assert True in directions
    assert False in directions
    flips = sum(one != two for one, two in itertools.pairwise(directions))
    assert flips <= 2
    assert safe(plant, 1.0)


def test_a_swinging_load_is_met_with_ever_fewer_moves(kit) -> None:
    """Each thrift that had to be undone makes the next one wait longer."""
    plant = kit.Plant(tight(margin="100%", hold_off="0s"), 1_200)

    def swing(tick: int) -> None:
        plant.in_use_blocks = 8_000 if tick // 40 % 2 else 0

    plant.run(1_000, swing)
    early = len(plant.moves)
    plant.run(1_000, swing)
    late = len(plant.moves) - early
    held = {decision.of(Lever.SPLIT).reason for decision in plant.decisions}
    assert early > 0
    assert late < early
    assert Reason.BACKED_OFF in held


def test_pending_blocks_are_waited_for(kit) -> None:
    plant = kit.Plant(tight(), 150)
    plant.lag_blocks = 20
    plant.run(10)
    assert plant.moves == [(150, 657)]
    plant.run(60)
    assert plant.snapshot.offload.lent_blocks == 657
    assert len(plant.moves) == 1


def test_replay_is_deterministic(kit) -> None:
    def once() -> list[Any]:
        rng = random.Random(5)
        plant = kit.Plant(tight(), 2_000)

        def wander(_: int) -> None:
            plant.in_use_blocks = max(0, min(9_000, plant.in_use_blocks + rng.randint(-900, 900)))

        plant.run(500, wander)
        return plant.decisions

    assert once() == once()


def test_multiplier_settles_where_the_pool_fits(kit) -> None:
    """Hot buffers of 60 requests fill the pool; constant demand must not make it flap."""
    policy = Policy.model_validate(
        {"version": 1, "hot": {"window_shrink": "3s", "window_grow": "10s"}}
    )
    plant = kit.Plant(policy, 650)
    plant.running = 60
    lease_of_all = 60 * kit.geometry.hot_groups * 32

    def demand(tick: int) -> None:
        # 2x leaves 2 % of the GPU pool free and 1.5x leaves 26 %, which is room enough to
        # grow but not enough to have grown.
        taken = round(lease_of_all * plant.snapshot.hot.multiplier)
        free = max(0, 31_300 - taken)
        plant.snapshot = kit.change(
            plant.snapshot,
            gpu__free_blocks=free,
            gpu__total_blocks=31_900,
            gpu__waiting_for_blocks=free == 0,
            requests__waiting=int(free < 1_000),
            hot__references_total=10_000 * tick,
            hot__loads_total=1_000 * tick,
            hot__h2d_bytes_total=6_400_000 * tick,
        )

    plant.run(600, demand)
    changes = [one for one in plant.decisions if one.of(Lever.MULTIPLIER).acts]
    held = plant.decisions[-1].of(Lever.MULTIPLIER)
    assert held.reason is Reason.LIMITED_BY_IN_USE
    assert plant.snapshot.hot.multiplier == 1.5
    assert len(changes) == 1


def test_admission_follows_the_live_set_without_flapping(kit) -> None:
    rng = random.Random(3)
    plant = kit.Plant(tight(), 657)
    mean = 0

    def sessions(tick: int) -> None:
        nonlocal mean
        mean = 200_000 if tick < 100 or tick >= 300 else 800_000
        plant.snapshot = kit.change(
            plant.snapshot,
            sessions__live_set_tokens=round(mean * rng.uniform(0.9, 1.1)),
            sessions__live_sessions=20,
        )

    plant.run(500, sessions)
    acted = [
        (decision.tick, decision.of(Lever.ADMISSION).reason)
        for decision in plant.decisions
        if decision.of(Lever.ADMISSION).acts
    ]
    assert [reason for _, reason in acted] == [Reason.COVERAGE_LOW, Reason.COVERAGE_RECOVERED]
    assert acted[0][0] == 101
    assert acted[1][0] == pytest.approx(331, abs=1)


@pytest.mark.parametrize("share", [0.02, 0.4])
def test_a_node_of_a_few_hundred_blocks_converges_in_whole_blocks(kit, share: float) -> None:
    small = dataclasses.replace(
        kit.geometry,
        block_tokens=16,
        host_block_bytes=16_384,
        offload_chunk_tokens=16,
        offload_chunk_bytes=2_176,
        chunks_per_host_block=7,
        budget_blocks=400,
        max_model_len=2_048,
    )
    plant = kit.Plant(tight(), round(share * small.budget_blocks), small)
    plant.in_use_blocks = 100
    plant.run(300)
    moves = len(plant.moves)
    assert moves >= (3 if share > 0.1 else 1)
    assert safe(plant)
    plant.run(500)
    assert len(plant.moves) == moves


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


@pytest.mark.long
def test_it_finds_what_the_geometry_does_not_know(kit) -> None:
    """Chunks take four times their size: equal reach of declared bytes serves little."""
    plain, measured = node(kit, strategy="equal-reach"), node(kit)
    plain.run(700)
    measured.run(700)
    best = max(served_at(kit, lent, 4.0) for lent in (68, 76, 84))
    assert plain.run(300) < 0.5 * best
    assert measured.run(300) > 0.9 * best
    assert {one.reason for one in measured.moves()} == {Reason.OFFLOAD_WORTH_MORE}


@pytest.mark.long
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
        if "was expected to add" in decision.of(Lever.SPLIT).sentence
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


QUEUED_SESSIONS, HELD, SLOTS, HIT_S, MISS_S, THINK_S = 60, 25, 4, 2, 8, 40.0


class Queue:
    """One tick a second; the law is asked for the bound in every tick."""

    def __init__(self, kit: Any, ageing: str, max_wait: str = "10m", share: float = 0.0) -> None:
        self.kit = kit
        self.share, self.turn = share, OldestTurn()
        self.policy = Policy.model_validate(
            {"version": 1, "admission": {"ageing": ageing, "max_wait": max_wait}}
        )
        self.rng, self.memory, self.bound_s = random.Random(3), Memory(), 30.0
        self.held: OrderedDict[int, None] = OrderedDict()
        self.waiting: list[tuple[int, int]] = []
        self.running: list[tuple[int, int]] = []
        self.due = [(self.rng.uniform(0, THINK_S), session) for session in range(QUEUED_SESSIONS)]
        self.now_s = self.ended = 0
        self.waits: list[int] = []
        self.bounds: list[float] = []

    def run(self, seconds: int) -> float:
        """Calls an hour."""
        before = self.ended
        for _ in range(seconds):
            self._tick()
        return (self.ended - before) * 3_600 / seconds

    def _tick(self) -> None:
        self._end_and_arrive()
        snapshot = self.kit.change(
            self.kit.idle_snapshot(),
            at_s=float(self.now_s),
            requests__waiting=len(self.waiting),
            requests__finished_total=self.ended,
        )
        self.memory = remember(self.policy, snapshot, self.memory)
        self.bound_s = ageing_s(self.policy, self.memory, self.bound_s)
        self.bounds.append(self.bound_s)
        calls = [
            WaitingCall(index, int(session not in self.held), self.now_s - came_s)
            for index, (came_s, session) in enumerate(self.waiting)
        ]
        # A session has one call at a time; calls wait in order of arrival.
        names = [str(session) for _, session in self.waiting]
        due = bool(names) and self.turn.due(names, names[0], self.share)
        order = held_prefix_first(calls, self.bound_s, oldest_first=due)
        chosen = order[: SLOTS - len(self.running)]
        for index in chosen:
            came_s, session = self.waiting[index]
            self.waits.append(self.now_s - came_s)
            takes_s = HIT_S if session in self.held else MISS_S
            self.held.pop(session, None)
            self.running.append((self.now_s + takes_s, session))
        self.waiting = [one for index, one in enumerate(self.waiting) if index not in chosen]
        self.now_s += 1

    def _end_and_arrive(self) -> None:
        for ends_s, session in [one for one in self.running if one[0] <= self.now_s]:
            self.running.remove((ends_s, session))
            self.ended += 1
            self.held[session] = None
            while len(self.held) > HELD:
                self.held.popitem(last=False)
            self.due.append((self.now_s + self.rng.expovariate(1 / THINK_S), session))
        for due_s, session in [one for one in self.due if one[0] <= self.now_s]:
            self.due.remove((due_s, session))
            self.waiting.append((self.now_s, session))


def test_a_bound_below_the_natural_wait_is_the_order_of_arrival_again(kit) -> None:
    short, arrival, long = Queue(kit, "30s"), Queue(kit, "1ms"), Queue(kit, "10m")
    calls = short.run(2_400), arrival.run(2_400), long.run(2_400)
    assert calls[0] == pytest.approx(calls[1], rel=0.03)
    assert calls[0] < 0.65 * calls[2]


def test_auto_finds_a_bound_that_keeps_the_order_useful(kit) -> None:
    auto, long = Queue(kit, "auto"), Queue(kit, "10m")
    auto.run(1_200)
    assert auto.run(1_200) > 0.95 * long.run(2_400)
    assert len(set(auto.bounds[600:])) <= 2, "it settles"


def test_auto_never_goes_beyond_max_wait(kit) -> None:
    queue = Queue(kit, "auto", "45s")
    queue.run(1_200)
    assert max(queue.bounds) == 45.0


def test_nobody_is_passed_over_for_much_longer_than_the_bound(kit) -> None:
    queue = Queue(kit, "auto")
    queue.run(2_400)
    # Aged calls start by how long they have waited, so what is above is the queue of the aged.
    assert max(queue.waits) <= max(queue.bounds) + 60


def test_a_share_of_the_starts_for_the_oldest_bounds_waits_at_little_loss(
    kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dear misses and short pauses: ageing lets the longest waits grow beyond those of arrival."""
    monkeypatch.setattr(sys.modules[__name__], "THINK_S", 10.0)
    monkeypatch.setattr(sys.modules[__name__], "HELD", 45)
    monkeypatch.setattr(sys.modules[__name__], "MISS_S", 16)
    shared, aged, arrival = Queue(kit, "10m", share=0.1), Queue(kit, "10m"), Queue(kit, "1ms")
    calls = [queue.run(4_800) for queue in (shared, aged, arrival)]
    longest = [max(queue.waits[len(queue.waits) // 2 :]) for queue in (shared, aged, arrival)]
    assert longest[1] > 2 * longest[2]
    assert longest[0] < 0.8 * longest[2]
    assert calls[0] > 0.65 * calls[1]
    assert calls[0] > 4 * calls[2]
