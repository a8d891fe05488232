"""Runs the oracle and every backend on the same steps and compares every word they produce."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from oracle import Oracle, OracleRow, OracleStep

from hisparsed.kernels.api import (
    COUNTERS,
    Geometry,
    Resolution,
    ResolverState,
    invalidate,
    reset,
    resolve,
    set_capacity,
)
from hisparsed.kernels.backends import Name

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Set only in the separate process that test_triton.py starts: Triton reads it once."""

BACKENDS: tuple[Name, ...] = ("torch", "cpp", "triton") if INTERPRETED else ("torch", "cpp")


@dataclass(frozen=True)
class Shape:
    states: int = 4
    capacity: int = 16
    positions: int = 96
    block_size: int = 4
    stride: int = 10
    slab_blocks: int = 4000
    host_blocks: int = 500
    topk: int = 6
    sample_period: int = 2
    ghost_every: int = 4
    resident_by_state: bool = False
    index_dtype: torch.dtype = torch.int64

    @property
    def pages(self) -> int:
        return -(-self.positions // self.block_size)

    @property
    def hot_blocks(self) -> int:
        return -(-self.capacity // self.block_size)

    def oracle(self) -> Oracle:
        return Oracle(
            rows=[OracleRow() for _ in range(self.states)],
            max_capacity=self.capacity,
            max_positions=self.positions,
            sample_period=self.sample_period,
            ghost_every=self.ghost_every,
            block_size=self.block_size,
            attention_block_stride=self.stride,
            host_blocks=self.host_blocks,
            resident_by_state=self.resident_by_state,
        )

    def geometry(self) -> Geometry:
        return Geometry(
            block_size=self.block_size,
            attention_block_stride=self.stride,
            slab_blocks=self.slab_blocks,
            host_blocks=self.host_blocks,
            resident_by_state=self.resident_by_state,
        )

    def state(self, device: str | torch.device = "cpu") -> ResolverState:
        return ResolverState.create(
            self.states,
            self.capacity,
            self.positions,
            sample_period=self.sample_period,
            ghost_every=self.ghost_every,
            device=device,
        )


@dataclass
class Lockstep:
    """``step`` and friends run on all, assert equality, and return what the oracle said."""

    shape: Shape
    oracle: Oracle = field(init=False)
    states: dict[str, ResolverState] = field(init=False)

    def __post_init__(self) -> None:
        self.oracle = self.shape.oracle()
        self.geometry = self.shape.geometry()
        self.states = {name: self.shape.state() for name in BACKENDS}

    def reset(self, row: int, capacity: int) -> None:
        self.oracle.reset(row, capacity)
        for state in self.states.values():
            reset(state, row, capacity=capacity)
        self.compare_states()

    def set_capacity(self, row: int, capacity: int) -> list[tuple[int, int]]:
        expected = self.oracle.set_capacity(row, capacity)
        for name, state in self.states.items():
            moves = [tuple(pair) for pair in set_capacity(state, row, capacity).tolist()]
            assert moves == expected, name
        self.compare_states()
        return expected

    def invalidate(self, pairs: Sequence[tuple[int, int]]) -> None:
        for row, position in pairs:
            if row >= 0:
                self.oracle.invalidate(row, position)
        rows = torch.tensor([row for row, _ in pairs], dtype=torch.int32)
        positions = torch.tensor([position for _, position in pairs], dtype=torch.int32)
        for state in self.states.values():
            invalidate(state, rows, positions)
        self.compare_states()

    def step(
        self,
        topk: list[list[int]],
        request_ids: list[int],
        state_of_request: list[int],
        source: list[list[int]],
        resident: list[list[int]],
        hot: list[list[int]],
        scratch: list[int] | None = None,
    ) -> OracleStep:
        self.oracle.clock += 1
        for state in self.states.values():
            state.begin_step()
        expected = self.oracle.resolve(
            topk, request_ids, state_of_request, source, resident, hot, scratch or []
        )
        width = len(topk[0])
        for name, state in self.states.items():
            out = Resolution.create(len(topk) + 1, width, index_dtype=self.shape.index_dtype)
            for output in vars(out).values():
                output.fill_(77)
            found = resolve(
                state,
                self.geometry,
                *(_int32(data) for data in (topk, request_ids, state_of_request)),
                *(_table(data) for data in (source, resident, hot)),
                None if scratch is None else _int32(scratch),
                out=out,
                backend=name,
            )
            compare_outputs(name, found, expected)
            assert int(out.valid_counts[-1]) == 77, f"{name} wrote beyond its rows"
        self.compare_states()
        return expected

    def compare_states(self) -> None:
        for name, state in self.states.items():
            for index, row in enumerate(self.oracle.rows):
                _compare_row(f"{name} row {index}", state, index, row)


def compare_outputs(name: str, found: Resolution, expected: OracleStep) -> None:
    assert found.physical_rows.tolist() == expected.physical, name
    assert found.attention_indices.tolist() == expected.attention, name
    assert found.valid_counts.tolist() == expected.valid, name
    assert found.miss_mask.tolist() == expected.miss, name
    counts = found.swap_counts.tolist()
    assert counts == [len(row) for row in expected.swap_host], name
    for cells, rows in (
        (found.swap_host.tolist(), expected.swap_host),
        (found.swap_physical.tolist(), expected.swap_physical),
    ):
        assert [row[:count] for row, count in zip(cells, counts, strict=True)] == rows, name


def _compare_row(what: str, state: ResolverState, index: int, row: OracleRow) -> None:
    slot_pos = [-1] * state.max_capacity
    slot_stamp = [0] * state.max_capacity
    for position, slot in row.held.items():
        slot_pos[slot] = position
        slot_stamp[slot] = row.stamp[position]
    ghosts = row.ghosts + [-1] * (state.ghost_pos.shape[1] - len(row.ghosts))
    assert state.slot_pos[index].tolist() == slot_pos, what
    assert state.slot_stamp[index].tolist() == slot_stamp, what
    assert int(state.capacity[index]) == row.capacity, what
    assert int(state.step[index]) == row.step, what
    assert state.counters[index].tolist() == [row.counters[name] for name in COUNTERS], what
    assert state.octile[index].tolist() == row.octile, what
    assert int(state.octile_misses[index]) == row.octile_misses, what
    assert state.ghost_pos[index].tolist() == ghosts, what
    assert state.ghost[index].tolist() == row.ghost, what


def _int32(data: Sequence[object]) -> torch.Tensor:
    return torch.tensor(data, dtype=torch.int32)


def _table(data: list[list[int]]) -> torch.Tensor:
    """A block table with strided rows, as a slice of a larger table has."""
    width = len(data[0]) if data else 0
    wide = torch.full((len(data), width + 3), 99, dtype=torch.int32)
    wide[:, :width] = torch.tensor(data, dtype=torch.int32).view(len(data), width)
    return wide[:, :width]
