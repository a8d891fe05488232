"""Errors of a caller: each is named, and changes no state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from lockstep import BACKENDS

from hisparsed.kernels.api import (
    Geometry,
    Resolution,
    ResolverState,
    RowLayout,
    reset,
    resolve,
    set_capacity,
)

pytestmark = pytest.mark.usefixtures("cpp_is_built")


def ints(data: list[Any]) -> torch.Tensor:
    return torch.tensor(data, dtype=torch.int32)


def good_call(**changes: Any) -> dict[str, Any]:
    state = ResolverState.create(2, 8, 40)
    for row in range(2):
        reset(state, row, capacity=8)
    return {
        "state": state,
        "geometry": Geometry(4, 4, 100, 100),
        "topk": ints([[0, 1], [2, 3]]),
        "request_ids": ints([0, 1]),
        "state_of_request": ints([0, 1]),
        "source_table": ints([[1, 2], [3, 4]]),
        "resident_table": ints([[0, 0], [0, 0]]),
        "hot_table": ints([[10, 11], [12, 13]]),
        **changes,
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk": torch.zeros(2, 2)}, r"topk must be 2-D torch.int32, got 2-D torch.float32"),
        ({"topk": ints([0, 1])}, r"topk must be 2-D torch.int32, got 1-D torch.int32"),
        ({"topk": ints([[0, 1, 2]] * 4).t()[:2]}, r"topk must be contiguous"),
        ({"request_ids": ints([0])}, r"request_ids has 1 entries for 2 rows"),
        ({"hot_table": ints([[10, 11]])}, r"hot_table has 1 rows, needs 2"),
        ({"hot_table": ints([[10, 11], [12, 13]]).t()}, r"hot_table must be contiguous within"),
        ({"hot_table": ints([[10, 11], [12, 0]])}, r"state row 1: capacity 8 needs 2 hot blocks"),
        ({"hot_table": ints([[10], [12]])}, r"state row 0: capacity 8 needs 2 .* names 1"),
        ({"state_of_request": ints([1, 1])}, r"no two requests may share a state row"),
        ({"request_ids": ints([0, 7])}, r"row 1: request id 7 is not in state_of_request"),
        ({"state_of_request": ints([0, 2])}, r"request 1: state row 2 does not exist"),
        ({"out": Resolution.create(2, 3)}, r"out is made for a top-k of 3, topk has 2"),
        ({"out": Resolution.create(1, 2)}, r"rows 0 to 2 do not fit outputs made for 1"),
        (
            {
                "geometry": Geometry(4, 2000, 2**21, 100),
                "out": Resolution.create(2, 2, index_dtype=torch.int32),
            },
            r"do not fit int32",
        ),
    ],
)
def test_wrong_arguments_are_named(backend: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(**good_call(**changes), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_one_request_must_be_consecutive(backend: str) -> None:
    call = good_call(topk=ints([[0, 1]] * 3), request_ids=ints([0, 1, 0]))
    with pytest.raises(ValueError, match="must be consecutive"):
        resolve(**call, backend=backend)
    assert call["state"].step.tolist()[0] == 0
    assert (call["state"].slot_pos[0] == -1).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("capacity", [9, -1])
def test_capacity_that_cannot_be_is_refused_before_its_slots_are_touched(
    backend: str, capacity: int
) -> None:
    call = good_call()
    call["state"].capacity[1] = capacity
    said = f"state row 1: capacity must be 0 to 8 rows, got {capacity}"
    with pytest.raises(ValueError, match=said):
        resolve(**call, backend=backend)
    assert call["state"].step.tolist()[1] == 0
    assert (call["state"].slot_pos[1] == -1).all()


def outputs(**changes: torch.Tensor) -> Resolution:
    return replace(Resolution.create(2, 3), **changes)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("physical_rows", torch.zeros(2, 3, dtype=torch.int32), "must be torch.int64, got"),
        ("attention_indices", torch.zeros(2, 3), "must be torch.int32 or torch.int64, got"),
        ("valid_counts", ints([0, 0, 0]), r"with shape \(2,\), got shape \(3,\)"),
        ("miss_mask", torch.zeros(2, 2, dtype=torch.bool), r"with shape \(2, 3\), got shape"),
        ("swap_host", torch.zeros(3, 2, dtype=torch.int64).t(), r"must be contiguous"),
        ("swap_counts", torch.zeros(2, dtype=torch.int64), "must be torch.int32, got"),
        ("swap_physical", torch.zeros(2, 3, dtype=torch.int64, device="meta"), "is on meta"),
    ],
)
def test_outputs_that_a_backend_would_write_past_are_refused(
    name: str, wrong: torch.Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=f"{name} .*{message}|{name} {message}"):
        outputs(**{name: wrong})


def test_state_arrays_are_checked_when_they_are_put_together() -> None:
    state = ResolverState.create(2, 8, 40)
    with pytest.raises(ValueError, match=r"slot_pos must be contiguous torch.int32 of shape"):
        replace(state, slot_pos=state.slot_pos[:, :7])
    with pytest.raises(ValueError, match=r"counters must be contiguous torch.int64 of shape"):
        replace(state, counters=state.counters[:1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_short_hot_lease_does_not_matter_while_everything_is_resident(backend: str) -> None:
    call = good_call(resident_table=ints([[5, 5], [6, 6]]), hot_table=ints([[0, 0], [0, 0]]))
    assert resolve(**call, backend=backend).valid_counts.tolist() == [2, 2]


def test_unknown_backend_is_named() -> None:
    with pytest.raises(ValueError, match="backend must be auto, torch, cpp or triton, got 'cuda'"):
        resolve(**good_call(), backend="cuda")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 8, 8), "num_states and max_positions"),
        ((1, 0, 8), "max_capacity must be 1 to 32704"),
        ((1, 32705, 8), "max_capacity must be 1 to 32704"),
    ],
)
def test_state_sizes_are_checked(arguments: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ResolverState.create(*arguments)


def test_capacity_and_row_out_of_range_change_nothing() -> None:
    state = ResolverState.create(2, 8, 40)
    with pytest.raises(ValueError, match="state row 1: capacity must be 0 to 8 rows, got 9"):
        set_capacity(state, 1, 9)
    with pytest.raises(IndexError, match="state row 2 does not exist: rows are 0 to 1"):
        reset(state, 2)
    assert state.capacity.tolist() == [0, 0]


def test_geometry_and_layout_refuse_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="attention_block_stride must be at least block_size"):
        Geometry(64, 63, 10, 10)
    with pytest.raises(ValueError, match="host_blocks must be at least 1, got 0"):
        Geometry(64, 64, 10, 0)
    with pytest.raises(ValueError, match="slab_block_bytes must hold a page of 64 B"):
        RowLayout(4, 16, 64, 63, (0,), (0,))
    with pytest.raises(ValueError, match="name the same layers"):
        RowLayout(4, 16, 64, 64, (0, 64), (0,))
