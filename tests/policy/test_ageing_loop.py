"""Ageing against an over-subscribed queue whose calls are cheap only while their prefix is held.

The plant: 60 sessions, room for 25 prefixes, four calls at a time; a call takes 2 s with its
prefix and 8 s without, and its session comes back after 40 s on average.
"""

from __future__ import annotations

import random
import sys
from collections import OrderedDict
from typing import Any

import pytest

from hisparsed.engine.admission import OldestTurn, WaitingCall, held_prefix_first
from hisparsed.policy.ageing import ageing_s
from hisparsed.policy.memory import Memory, observe
from hisparsed.policy.schema import Policy

SESSIONS, HELD, SLOTS, HIT_S, MISS_S, THINK_S = 60, 25, 4, 2, 8, 40.0


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
        self.due = [(self.rng.uniform(0, THINK_S), session) for session in range(SESSIONS)]
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
        self.memory = observe(self.policy, snapshot, self.memory)
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
