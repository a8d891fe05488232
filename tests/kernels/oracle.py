"""A brute-force resolver on dictionaries, written from the contract, not from the backends.

Slow and plain on purpose. ``OracleRow`` is one state row; ``Oracle.resolve`` is one step.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

EMPTY = -1
NOWHERE = -1


@dataclass
class OracleRow:
    capacity: int = 0
    step: int = 0
    held: dict[int, int] = field(default_factory=dict)
    """position -> slot"""
    stamp: dict[int, int] = field(default_factory=dict)
    """position -> step of last selection"""
    counters: Counter[str] = field(default_factory=Counter)
    octile: list[int] = field(default_factory=lambda: [0] * 8)
    octile_misses: int = 0
    ghosts: list[int] = field(default_factory=list)
    """sampled positions, the last selected first, -1 where one was rewritten since"""
    ghost: list[int] = field(default_factory=lambda: [0] * 17)

    def youngest_first(self) -> list[int]:
        return sorted(self.held, key=lambda p: (self.stamp[p], p), reverse=True)


@dataclass
class OracleStep:
    physical: list[list[int]]
    attention: list[list[int]]
    valid: list[int]
    miss: list[list[bool]]
    swap_host: list[list[int]]
    swap_physical: list[list[int]]


@dataclass
class Oracle:
    """Same sizes as the ``ResolverState`` and ``Geometry`` under test."""

    rows: list[OracleRow]
    max_capacity: int
    max_positions: int
    sample_period: int
    ghost_every: int
    block_size: int
    attention_block_stride: int
    host_blocks: int
    resident_by_state: bool = False
    clock: int = 0

    def is_ghost(self, position: int) -> bool:
        group = position // self.ghost_every
        hashed = (group * 0x9E3779B1) % 2**32 // 2**16
        return position % self.ghost_every == hashed % self.ghost_every

    def reset(self, row: int, capacity: int) -> None:
        self.rows[row] = OracleRow(capacity=capacity, step=self.rows[row].step)

    def invalidate(self, row: int, position: int) -> None:
        state = self.rows[row]
        state.held.pop(position, None)
        state.stamp.pop(position, None)
        state.ghosts = [-1 if ghost == position else ghost for ghost in state.ghosts]

    def set_capacity(self, row: int, capacity: int) -> list[tuple[int, int]]:
        state = self.rows[row]
        if capacity != state.capacity:
            state.octile = [0] * 8
            state.octile_misses = 0
        state.capacity = capacity
        for position in state.youngest_first()[capacity:]:
            del state.held[position], state.stamp[position]
        free = [slot for slot in range(capacity) if slot not in state.held.values()]
        moves = []
        for position in sorted(state.held, key=lambda p: state.held[p]):
            slot = state.held[position]
            if slot >= capacity:
                state.held[position] = free.pop(0)
                moves.append((slot, state.held[position]))
        return moves

    def resolve(
        self,
        topk: list[list[int]],
        request_ids: list[int],
        state_of_request: list[int],
        source: list[list[int]],
        resident: list[list[int]],
        hot: list[list[int]],
        scratch: list[int],
    ) -> OracleStep:
        size = self.block_size
        width = len(topk[0]) if topk else 0
        physical = [[NOWHERE] * width for _ in topk]
        miss = [[False] * width for _ in topk]
        swaps: dict[int, list[tuple[int, int]]] = {}
        scratch_rows = []
        for block in scratch:
            if block <= 0:
                break
            scratch_rows += [block * size + offset for offset in range(size)]

        for request in dict.fromkeys(request_ids):
            if request < 0 or state_of_request[request] < 0:
                continue
            state_row = state_of_request[request]
            state = self.rows[state_row]
            pages = resident[state_row if self.resident_by_state else request]
            cells = [
                (r, k)
                for r, owner in enumerate(request_ids)
                if owner == request
                for k in range(width)
            ]
            backed: dict[int, int] = {}
            for r, k in cells:
                position = topk[r][k]
                if position < 0:
                    continue
                page = position // size
                if page < len(pages) and pages[page] > 0:
                    physical[r][k] = pages[page] * size + position % size
                    state.counters["references"] += 1
                    state.counters["resident"] += 1
                    continue
                block = source[request][page] if page < len(source[request]) else 0
                if 0 < block < self.host_blocks and position < self.max_positions:
                    backed[position] = block * size + position % size
                    state.counters["references"] += 1
            if not backed:
                continue
            swap: list[tuple[int, int]] = []
            place = self._advance(state, backed, hot[request], scratch_rows, swap)
            loaded = {target for _, target in swap}
            for r, k in cells:
                position = topk[r][k]
                if physical[r][k] == NOWHERE and position in place:
                    physical[r][k] = place[position]
                    miss[r][k] = place[position] in loaded
            rows = [r for r, owner in enumerate(request_ids) if owner == request]
            for r in rows:
                swaps[r], swap = swap[:width], swap[width:]

        stride = self.attention_block_stride
        return OracleStep(
            physical=physical,
            attention=[
                [v if v < 0 else v // size * stride + v % size for v in line] for line in physical
            ],
            valid=[sum(v >= 0 for v in line) for line in physical],
            miss=miss,
            swap_host=[[h for h, _ in swaps.get(r, [])] for r in range(len(topk))],
            swap_physical=[[p for _, p in swaps.get(r, [])] for r in range(len(topk))],
        )

    def _advance(
        self,
        state: OracleRow,
        backed: dict[int, int],
        hot_blocks: list[int],
        scratch_rows: list[int],
        swap: list[tuple[int, int]],
    ) -> dict[int, int]:
        state.step += 1
        hits = sorted(p for p in backed if p in state.held)
        misses = sorted(p for p in backed if p not in state.held)
        self._sample(state, sorted(backed), hits, misses)
        for position in hits:
            state.stamp[position] = state.step
        state.counters["hits"] += len(hits)

        taken = set(state.held.values())
        victims = [slot for slot in range(state.capacity) if slot not in taken]
        stale = sorted(
            (p for p in state.held if state.stamp[p] != state.step),
            key=lambda p: (state.stamp[p], p),
        )
        victims += [state.held[p] for p in stale]
        slots = sorted(victims[: len(misses)])
        lost = [p for p, slot in state.held.items() if slot in set(slots)]
        for position in lost:
            del state.held[position], state.stamp[position]

        place = {p: self._hot_row(hot_blocks, state.held[p]) for p in hits}
        for index, position in enumerate(misses):
            if index < len(slots):
                state.held[position] = slots[index]
                state.stamp[position] = state.step
                place[position] = self._hot_row(hot_blocks, slots[index])
                state.counters["loads"] += 1
            elif scratch_rows:
                place[position] = scratch_rows.pop(0)
                state.counters["spills"] += 1
            else:
                state.counters["dropped"] += 1
                continue
            swap.append((backed[position], place[position]))
        return place

    def _hot_row(self, hot_blocks: list[int], slot: int) -> int:
        return hot_blocks[slot // self.block_size] * self.block_size + slot % self.block_size

    def _sample(
        self, state: OracleRow, union: list[int], hits: list[int], misses: list[int]
    ) -> None:
        ghosts = sorted((p for p in union if self.is_ghost(p)), reverse=True)
        known = [p for p in state.ghosts if p >= 0]
        if self.clock % self.sample_period == 0:
            order = state.youngest_first()
            for position in hits:
                state.octile[order.index(position) * 8 // state.capacity] += 1
            state.octile_misses += len(misses)
            for position in ghosts:
                depth = 16
                if position in known:
                    rows = known.index(position) * self.ghost_every
                    depth = min(rows * 16 // self.max_capacity, 16)
                state.ghost[depth] += 1
        kept = -(-self.max_capacity // self.ghost_every)
        state.ghosts = (ghosts + [p for p in known if p not in ghosts])[:kept]
