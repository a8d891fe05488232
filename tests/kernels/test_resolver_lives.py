"""Requests that live as on a node, at the edges of every size: the oracle and all backends agree.

Each has a context that grows up to the longest one, drafts that are written again, a hot buffer
that grows and shrinks down to nothing, and a state row that another has had before.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from lockstep import INTERPRETED, Lockstep, Shape

pytestmark = pytest.mark.usefixtures("cpp_is_built")

STEPS = 8 if INTERPRETED else 80
QUICK, LIVES = (2, 4) if INTERPRETED else (4, 24)


@dataclass
class Request:
    state: int
    context: int
    drafts: int


class Node:
    """Slots as many as ``shape.states``; a request that ends leaves its row to the next."""

    def __init__(self, seed: int) -> None:
        self.random = rng = random.Random(1000 + seed)
        self.shape = Shape(
            states=rng.choice([2, 4]),
            capacity=rng.choice([1, 5, 31, 33, 64]),
            # Around whole words of the bitmap, and one word that is not whole.
            positions=rng.choice([31, 32, 33, 64, 95, 1025]),
            block_size=rng.choice([1, 4, 16]),
            stride=20,
            topk=rng.choice([1, 5, 16]),
            host_blocks=2000,
            sample_period=rng.choice([1, 2, 5]),
            # From every position to fewer samples than one a hot buffer.
            ghost_every=rng.choice([1, 4, 128]),
        )
        self.world = Lockstep(self.shape)
        self.requests: list[Request] = []
        self.hot = [self.blocks(self.shape.hot_blocks) for _ in range(self.shape.states)]
        self.source = [self.blocks(self.shape.pages) for _ in range(self.shape.states)]

    def blocks(self, count: int) -> list[int]:
        return self.random.sample(range(1, self.shape.host_blocks), count)

    def come_and_go(self) -> None:
        rng = self.random
        if self.requests and rng.random() < 0.15:
            self.requests.remove(rng.choice(self.requests))
        taken = {request.state for request in self.requests}
        free = [row for row in range(self.shape.states) if row not in taken]
        if free and rng.random() < 0.5:
            state = rng.choice(free)
            self.world.reset(state, rng.randint(0, self.shape.capacity))
            self.source[state] = self.blocks(self.shape.pages)
            context = rng.choice([1, self.shape.positions // 2 + 1, self.shape.positions])
            self.requests.append(Request(state, context, rng.randrange(4)))

    def write(self) -> None:
        """Tokens go to the end of a context; the last drafts are written again."""
        written = []
        for request in self.requests:
            start = max(0, request.context - self.random.randint(0, request.drafts))
            end = min(self.shape.positions, start + 1 + request.drafts)
            written += [(request.state, position) for position in range(start, end)]
            request.context = max(request.context, end)
        self.world.invalidate(written)

    def resize(self) -> None:
        row = self.random.randrange(self.shape.states)
        most = self.shape.capacity
        self.world.set_capacity(row, self.random.choice([0, 1, most // 2, most - 1, most]))

    def chosen(self, request: Request) -> list[int]:
        """Top-k of one row: near the end, anywhere, one position only, or what is no position."""
        rng, context, most = self.random, request.context, self.shape.positions
        match rng.randrange(8):
            case 0:
                return [context - 1] * self.shape.topk
            case 1:
                pool = [-1, context - 1, most - 1, most, most + 40, 2**31 - 1]
                return [rng.choice(pool) for _ in range(self.shape.topk)]
            case 2 | 3:
                first = max(0, context - 2 * self.shape.topk)
                return [rng.randrange(first, context) for _ in range(self.shape.topk)]
        return [rng.randrange(context) for _ in range(self.shape.topk)]

    def step(self) -> None:
        rng, shape = self.random, self.shape
        running = [one for one in self.requests if rng.random() < 0.9]
        rng.shuffle(running)
        if not running:
            return
        request_ids: list[int] = []
        topk: list[list[int]] = []
        for index, request in enumerate(running):
            for _ in range(1 + rng.randint(0, request.drafts)):
                request_ids.append(index)
                topk.append(self.chosen(request))
            if rng.random() < 0.2:
                request_ids.append(-1)
                topk.append([0] * shape.topk)
        states = [request.state for request in running]
        # Columns behind a request's own pages hold what an earlier one has left there.
        nulls = [[0] * shape.pages for _ in running]
        if rng.random() < 0.3:
            nulls[0][-1] = 7
        self.world.step(
            topk,
            request_ids,
            states,
            [self.source[state] for state in states],
            nulls,
            [self.hot[state] for state in states],
            rng.choice([None, [3000], [3000, 3001, 3002, 3003]]),
        )


@pytest.mark.parametrize(
    "seed",
    [*range(QUICK), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(QUICK, LIVES))],
)
def test_lives_of_many_requests_agree_word_for_word(seed: int) -> None:
    node = Node(seed)
    for _ in range(STEPS):
        node.come_and_go()
        node.write()
        if node.random.random() < 0.3:
            node.resize()
        node.step()
    assert sum(row.step for row in node.world.oracle.rows) > 0
