"""A step resolved in several calls: the same plan, and scratch used in turns."""

from __future__ import annotations

import random

import pytest
import torch

from hisparsed.kernels.api import Geometry, Resolution, ResolverState, reset, resolve
from hisparsed.kernels.backends import Name

REQUESTS, ROWS, TOPK, BLOCK, PAGES = 3, 2, 8, 4, 10
GEOMETRY = Geometry(BLOCK, BLOCK, slab_blocks=100, host_blocks=100)


def ints(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def fresh_state() -> ResolverState:
    state = ResolverState.create(REQUESTS, TOPK, PAGES * BLOCK, sample_period=1)
    for row in range(REQUESTS):
        reset(state, row, capacity=TOPK)
    return state


def selections(steps: int) -> list[torch.Tensor]:
    rng = random.Random(0)
    positions = range(PAGES * BLOCK)
    return [
        ints([sorted(rng.sample(positions, TOPK)) for _ in range(REQUESTS * ROWS)])
        for _ in range(steps)
    ]


def resolve_rows(
    state: ResolverState, topk: torch.Tensor, start: int, stop: int, scratch: list[int], name: Name
) -> Resolution:
    out = Resolution.create(REQUESTS * ROWS, TOPK)
    of_row = ints([row // ROWS for row in range(REQUESTS * ROWS)])
    pages = ints([[1 + request * PAGES + page for page in range(PAGES)] for request in range(3)])
    return resolve(
        state,
        GEOMETRY,
        topk[start:stop],
        of_row[start:stop],
        ints(range(REQUESTS)),
        pages,
        torch.zeros_like(pages),
        ints([[1, 2], [3, 4], [5, 6]]),
        ints(scratch),
        out=out.part(start, stop),
        backend=name,
    )


@pytest.mark.parametrize("name", ["torch", "cpp"])
def test_requests_in_turns_change_state_and_load_as_in_one_call(name: Name) -> None:
    whole, parts = fresh_state(), fresh_state()
    ample = list(range(10, 30))
    for topk in selections(20):
        one = resolve_rows(whole, topk, 0, 6, ample, name)
        for start in (0, 2, 4):
            found = resolve_rows(parts, topk, start, start + ROWS, ample, name)
            assert torch.equal(found.swap_counts, one.swap_counts[start : start + ROWS])
            assert torch.equal(found.miss_mask, one.miss_mask[start : start + ROWS])
    for array in ("slot_pos", "slot_stamp", "ghost_pos", "step", "counters", "octile", "ghost"):
        assert torch.equal(getattr(whole, array), getattr(parts, array)), array
    assert int(whole.counters[:, 4].sum()) > 0


@pytest.mark.parametrize("name", ["torch", "cpp"])
def test_scratch_of_one_request_serves_all_in_turns(name: Name) -> None:
    """(rows - 1) x top-k scratch rows: enough for any one request, too few for three."""
    scratch = [10, 11]
    together, in_turns = fresh_state(), fresh_state()
    for topk in selections(20):
        resolve_rows(together, topk, 0, 6, scratch, name)
        for start in (0, 2, 4):
            found = resolve_rows(in_turns, topk, start, start + ROWS, scratch, name)
            assert bool((found.physical_rows >= 0).all())
    assert int(together.counters[:, 5].sum()) > 0
    assert int(in_turns.counters[:, 5].sum()) == 0


def test_parts_share_memory_and_stay_inside() -> None:
    out = Resolution.create(4, TOPK)
    out.part(1, 3).valid_counts.fill_(7)
    assert out.valid_counts[1:3].tolist() == [7, 7]
    with pytest.raises(ValueError, match="rows 3 to 5 do not fit outputs made for 4"):
        out.part(3, 5)
