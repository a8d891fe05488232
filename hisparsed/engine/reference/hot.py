"""Hot buffers of the reference node: the residency resolver of ``hisparsed.kernels`` at work.

One resolver state per index group, one state row per request. A step's top-k positions go in; slab
rows come out, after the rows that were only on the host have been fetched into the request's leased
blocks, or into scratch blocks where they do not fit. Capacity follows the lease, in whole blocks.

``plan_waves`` says which requests share the scratch blocks at the same time, from leases and row
counts alone, before anything is resolved. ``HotCurves`` keeps each request's miss curve between
reports, which come every tick and must stay cheap.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hisparsed.engine.reference.model_folder import ROW_BYTES
from hisparsed.engine.reference.requests import RequestState, RequestTables
from hisparsed.engine.reference.store import KVStore
from hisparsed.engine.worker_report import DISTINCT, MAX_REQUESTS, HotRows, RowCurve, request_curves
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
    from hisparsed.engine.reference.requests import ScheduledTokens


@dataclass(frozen=True)
class Wave:
    """Decode rows ``[start, stop)`` of a step, whole requests."""

    start: int
    stop: int


def most_spills(*, rows: int, context: int, topk: int, capacity: int) -> int:
    """Rows of one request that may not fit its hot buffer of ``capacity`` rows.

    ``rows`` decode rows select at most ``rows * topk`` tokens, and no more than ``context``.
    Without a hot buffer there is nothing on the host only, so nothing spills.
    """
    if capacity == 0:
        return 0
    return max(0, min(rows * topk, context) - capacity)


def plan_waves(rows: Sequence[int], spills: Sequence[int], scratch_rows: int) -> tuple[Wave, ...]:
    """Consecutive requests in as few waves as their spills allow.

    ``rows`` and ``spills`` of each request, in the order of the step. A request whose spills
    exceed ``scratch_rows`` gets its own wave.
    """
    waves: list[Wave] = []
    start = stop = used = 0
    for count, needed in zip(rows, spills, strict=True):
        if used + needed > scratch_rows and stop > start:
            waves.append(Wave(start, stop))
            start, used = stop, 0
        stop += count
        used += needed
    if stop > start:
        waves.append(Wave(start, stop))
    return tuple(waves)


_FRESH_FOR_S = 1.0


class HotCurves:
    """``states``: one per index group. ``clock_s`` is monotonic seconds."""

    def __init__(
        self,
        states: Sequence[ResolverState],
        clock_s: Callable[[], float],
        fresh_for_s: float = _FRESH_FOR_S,
    ) -> None:
        self._states = states
        self._clock_s = clock_s
        self._fresh_for_s = fresh_for_s
        self._begun = [[(0, 0)] * state.num_states for state in states]
        self._curves: dict[str, RowCurve] = {}
        self._computed_s: float | None = None

    def begin(self, row: int) -> None:
        """A request begins in ``row``, or its hot buffer has changed its size."""
        for begun, state in zip(self._begun, self._states, strict=True):
            begun[row] = int(state.step[row]), int(state.counters[row, DISTINCT].sum())

    def by_request(self, requests: Mapping[str, RequestState]) -> Mapping[str, RowCurve]:
        """(hot rows of one group, rows loaded per step over all groups) by request.

        Largest hot buffers first, at most ``MAX_REQUESTS``; requests without enough sampled
        steps are omitted.
        """
        now_s = self._clock_s()
        if self._computed_s is None or now_s - self._computed_s >= self._fresh_for_s:
            self._computed_s = now_s
            self._curves = self._compute(requests)
        return self._curves

    def _compute(self, requests: Mapping[str, RequestState]) -> dict[str, RowCurve]:
        leased = sorted(
            ((name, state) for name, state in requests.items() if state.hot_blocks[0]),
            key=lambda one: -len(one[1].hot_blocks[0]),
        )[:MAX_REQUESTS]
        if not leased:
            return {}
        return request_curves(
            self._states,
            [(name, state.row) for name, state in leased],
            lambda group, row: self._begun[group][row],
        )


@dataclass(frozen=True)
class DecodeBatch:
    """The decode rows of one step: each request's rows one after the other."""

    segments: tuple[ScheduledTokens, ...]
    request_ids: torch.Tensor
    """int32 ``[D]``; a request goes by its state row."""


@dataclass(frozen=True)
class Located:
    """Where each decode row reads its top-k in one index group, until the next ``locate``."""

    rows: torch.Tensor
    """int64 ``[D, K]``, relative to a layer's base, 0 where invalid."""
    valid: torch.Tensor
    """bool ``[D, K]``."""
    waves: tuple[tuple[Wave, Resolution], ...]
    """Rows that are still to be fetched, by wave and layer; may be empty."""


class ReferenceHotBuffers:
    """Residency of all running requests.

    ``max_rows``: largest hot buffer of one request. ``query_len``: most decode rows of one.
    ``scratch``: blocks that all requests share.
    """

    def __init__(
        self,
        store: KVStore,
        tables: RequestTables,
        max_rows: int,
        query_len: int = 1,
        scratch: Sequence[int] = (),
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
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
        self._curves = HotCurves(self._states, clock_s)
        self._layouts = [
            self._row_layout(geometry.group_layers(group)) for group in range(geometry.index_groups)
        ]
        self._layer_layouts = [self._row_layout([layer]) for layer in range(geometry.layers)]
        self._resolution = Resolution.create(rows * query_len, geometry.index_topk)
        self._own_row = torch.arange(rows, dtype=torch.int32)
        self._scratch = torch.tensor(list(scratch), dtype=torch.int32)
        self._scratch_rows = len(scratch) * store.block_size
        self._retired = torch.zeros(len(COUNTERS), dtype=torch.int64)
        self._written_to = [0] * rows
        self._slab = store.slab.view(torch.uint8)
        self._host = store.host.view(torch.uint8)

    def _row_layout(self, layers: Iterable[int]) -> RowLayout:
        store, layers = self._store, list(layers)
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
        self._curves.begin(request.row)

    def lease_changed(self, request: RequestState) -> None:
        """The request was leased more hot blocks."""
        for group, state in enumerate(self._states):
            set_capacity(state, request.row, self._capacity(request, group))
        self._curves.begin(request.row)

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
        self._curves.begin(request.row)

    def _capacity(self, request: RequestState, group: int) -> int:
        return len(request.hot_blocks[group]) * self._store.block_size

    def rewritten(self, segments: Iterable[ScheduledTokens]) -> None:
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

    def batch(self, segments: Sequence[ScheduledTokens]) -> DecodeBatch:
        """The decode rows of ``segments``, the same for every index group of the step.

        Called once per step.
        """
        for state in self._states:
            state.begin_step()
        rows = [segment.row for segment in segments for _ in range(segment.count)]
        return DecodeBatch(tuple(segments), torch.tensor(rows, dtype=torch.int32))

    def locate(self, group: int, chosen: torch.Tensor, batch: DecodeBatch) -> Located:
        """Slab rows of each decode row's top-k, fetched where they can stay.

        ``chosen`` int32 ``[D, K]`` positions. All rows of a request share its hot buffer. ``read``
        fetches the rows that use the scratch blocks in turns. Raises ``RuntimeError`` when a
        selected row is nowhere: KV would have been lost.
        """
        waves = self._waves(group, batch)
        found = [self._resolve(group, chosen, batch, wave) for wave in waves]
        located = self._resolution.first(chosen.shape[0]).attention_indices
        valid = chosen >= 0
        if bool(((located < 0) & valid).any()):
            raise RuntimeError(f"index group {group}: a selected row is neither on GPU nor host")
        in_turns = len(waves) > 1
        if not in_turns:
            self._fetch(self._layouts[group], found[0])
        return Located(
            located.clamp(min=0), valid, tuple(zip(waves, found, strict=True)) if in_turns else ()
        )

    def read(self, layer: int, located: Located) -> torch.Tensor:
        """The located rows of ``layer``, int8 ``[D, K, ROW_BYTES]``."""
        base = self._store.layer_base[layer]
        if not located.waves:
            return self._store.rows[located.rows + base]
        parts = []
        for wave, found in located.waves:
            # The next wave's rows take the same scratch blocks, so these are read first.
            self._fetch(self._layer_layouts[layer], found)
            parts.append(self._store.rows[located.rows[wave.start : wave.stop] + base])
        return torch.cat(parts)

    def _waves(self, group: int, batch: DecodeBatch) -> tuple[Wave, ...]:
        requests = self._tables.requests
        spills = [
            most_spills(
                rows=segment.count,
                context=segment.end,
                topk=self._resolution.topk,
                capacity=self._capacity(requests[segment.request_id], group),
            )
            for segment in batch.segments
        ]
        return plan_waves([segment.count for segment in batch.segments], spills, self._scratch_rows)

    def _resolve(
        self, group: int, chosen: torch.Tensor, batch: DecodeBatch, wave: Wave
    ) -> Resolution:
        tables = self._tables
        return resolve(
            self._states[group],
            self._geometry,
            chosen[wave.start : wave.stop],
            batch.request_ids[wave.start : wave.stop],
            self._own_row,
            tables.source,
            tables.resident[group],
            tables.hot[group],
            self._scratch,
            out=self._resolution.part(wave.start, wave.stop),
        )

    def _fetch(self, layout: RowLayout, found: Resolution) -> None:
        gather(
            self._host,
            self._slab,
            layout,
            found.swap_host,
            found.swap_physical,
            found.swap_counts,
        )

    def miss_curve(self) -> tuple[tuple[int, float], ...]:
        """Pooled over all requests at the commonest capacity; see ``pooled_miss_curve``."""
        curve = pooled_miss_curve(self._states)
        if curve is None:
            return ()
        return tuple(zip(curve.capacities, curve.miss_ratios, strict=True))

    def request_curves(self) -> Mapping[str, RowCurve]:
        """Each request's own, in rows per step; kept between calls for a while."""
        return self._curves.by_request(self._tables.requests)

    def counters(self) -> dict[str, int]:
        """Cumulative counters over all requests and groups, and bytes fetched from the host."""
        total = self._retired.clone()
        for state in self._states:
            total += state.counters.sum(dim=0)
        named = dict(zip(COUNTERS, total.tolist(), strict=True))
        row_bytes = ROW_BYTES * self._store.geometry.layers_per_group
        named["h2d_bytes"] = (named["loads"] + named["spills"]) * row_bytes
        return named

    def by_request(self) -> dict[str, HotRows]:
        """Capacity, rows held and counters of each request, over all index groups."""
        requests = self._tables.requests
        rows = [request.row for request in requests.values()]
        capacity = torch.stack([state.capacity for state in self._states]).sum(dim=0)[rows]
        held = torch.stack([(state.slot_pos[rows] >= 0).sum(dim=1) for state in self._states])
        counters = torch.stack([state.counters for state in self._states]).sum(dim=0)[rows]
        return {
            request_id: HotRows(own_capacity, own_held, *own_counters[:4])
            for request_id, own_capacity, own_held, own_counters in zip(
                requests,
                capacity.tolist(),
                held.sum(dim=0).tolist(),
                counters.tolist(),
                strict=True,
            )
        }
