"""Hot buffers of the reference node: the residency resolver of ``hisparsed.kernels`` at work.

One resolver state an index group, one state row a request. A step's top-k positions go in;
out come slab rows to read, after the rows that were only on the host have been fetched into
the request's leased blocks. Capacity follows the lease, whole blocks at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from hisparsed.engine.reference.geometry import ROW_BYTES
from hisparsed.engine.reference.requests import RequestState, RequestTables
from hisparsed.engine.reference.store import KVStore
from hisparsed.kernels.api import (
    COUNTERS,
    Geometry,
    Resolution,
    ResolverState,
    RowLayout,
    apply_moves,
    gather,
    invalidate,
    pooled_miss_curve,
    reset,
    resolve,
    set_capacity,
)

if TYPE_CHECKING:
    from hisparsed.engine.reference.step import Segment


class HotBuffers:
    """Residency of all running requests. ``max_rows``: largest hot buffer of one request."""

    def __init__(self, store: KVStore, tables: RequestTables, max_rows: int) -> None:
        geometry = store.geometry
        rows, pages = tables.source.shape
        self._store = store
        self._tables = tables
        self._geometry = Geometry(
            block_size=store.block_size,
            attention_block_stride=store.block_rows,
            slab_blocks=store.num_blocks,
            host_blocks=store.host_blocks,
            resident_by_state=True,
        )
        self._states = [
            ResolverState.create(
                rows, max_rows, pages * store.block_size, sample_period=4, ghost_every=8
            )
            for _ in range(geometry.index_groups)
        ]
        self._layouts = [self._row_layout(group) for group in range(geometry.index_groups)]
        self._resolution = Resolution.create(rows, geometry.index_topk)
        self._retired = torch.zeros(len(COUNTERS), dtype=torch.int64)
        self._written_to = [0] * rows
        self._slab = store.slab.view(torch.uint8)
        self._host = store.host.view(torch.uint8)

    def _row_layout(self, group: int) -> RowLayout:
        store = self._store
        layers = store.geometry.group_layers(group)
        return RowLayout(
            block_size=store.block_size,
            row_bytes=ROW_BYTES,
            host_block_bytes=store.block_size * ROW_BYTES,
            slab_block_bytes=store.block_bytes,
            host_offsets=tuple(store.host_offsets[layer] for layer in layers),
            slab_offsets=tuple(store.layer_base[layer] * ROW_BYTES for layer in layers),
        )

    def reset(self, request: RequestState) -> None:
        """Give the state row to ``request``, with the hot blocks it came with."""
        self._written_to[request.row] = 0
        for group, state in enumerate(self._states):
            self._retired += state.counters[request.row]
            reset(state, request.row, capacity=self._capacity(request, group))

    def lease_changed(self, request: RequestState) -> None:
        """The request was leased more hot blocks."""
        for group, state in enumerate(self._states):
            set_capacity(state, request.row, self._capacity(request, group))

    def shrink(self, request: RequestState, blocks: int) -> None:
        """Keep the most recently used rows in the first ``blocks`` blocks of each group.

        Afterwards the blocks beyond may be given to others.
        """
        for group, state in enumerate(self._states):
            held = request.hot_blocks[group]
            if len(held) <= blocks:
                continue
            table = self._tables.hot[group, request.row]
            moves = set_capacity(state, request.row, blocks * self._store.block_size)
            apply_moves(self._slab, self._layouts[group], table, moves)
            del held[blocks:]
            table[blocks:] = 0

    def _capacity(self, request: RequestState, group: int) -> int:
        return len(request.hot_blocks[group]) * self._store.block_size

    def rewritten(self, segments: Iterable[Segment]) -> None:
        """Forget hot copies of rows that this step writes again (a position seen before)."""
        rows: list[int] = []
        positions: list[int] = []
        for segment in segments:
            seen = self._written_to[segment.row]
            again = range(segment.start, min(segment.end, seen))
            rows.extend([segment.row] * len(again))
            positions.extend(again)
            self._written_to[segment.row] = max(seen, segment.end)
        if rows:
            for state in self._states:
                invalidate(state, torch.tensor(rows), torch.tensor(positions))

    def locate(
        self, group: int, chosen: torch.Tensor, state_rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Slab rows of each request's top-k, fetched where needed, one decode row a request.

        ``chosen`` int32 ``[D, K]`` positions, ``state_rows`` int64 ``[D]``. Returns rows
        relative to a layer's base int64 ``[D, K]`` (0 where invalid) and validity bool.
        Raises ``RuntimeError`` when a selected row is nowhere: KV would have been lost.
        """
        tables = self._tables
        count = chosen.shape[0]
        found = resolve(
            self._states[group],
            self._geometry,
            chosen,
            torch.arange(count, dtype=torch.int32),
            state_rows.to(torch.int32),
            tables.source[state_rows],
            tables.resident[group],
            tables.hot[group][state_rows],
            out=self._resolution,
        )
        gather(
            self._host,
            self._slab,
            self._layouts[group],
            found.swap_host,
            found.swap_physical,
            found.swap_counts,
        )
        valid = chosen >= 0
        located = found.attention_indices
        if bool(((located < 0) & valid).any()):
            raise RuntimeError(f"index group {group}: a selected row is neither on GPU nor host")
        return located.clamp(min=0), valid

    def miss_curve(self) -> tuple[tuple[int, float], ...]:
        """Pooled over all requests at the commonest capacity; see ``pooled_miss_curve``."""
        curve = pooled_miss_curve(self._states)
        if curve is None:
            return ()
        return tuple(zip(curve.capacities, curve.miss_ratios, strict=True))

    def counters(self) -> dict[str, int]:
        """Cumulative counters over all requests and groups, and bytes fetched from the host."""
        total = self._retired.clone()
        for state in self._states:
            total += state.counters.sum(dim=0)
        named = dict(zip(COUNTERS, total.tolist(), strict=True))
        row_bytes = ROW_BYTES * self._store.geometry.layers_per_group
        named["h2d_bytes"] = (named["loads"] + named["spills"]) * row_bytes
        return named
