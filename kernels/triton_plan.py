"""First kernel of a Triton step: one program per request, from top-k cells to filled slots.

The only kernel that writes slots, ghosts and steps. It finds the run of rows and the union of their
selections, compares every slot with the union, picks slots for the misses and lists the loads. It
leaves in the workspace what the second kernel needs to answer the cells.
"""

from __future__ import annotations

import triton.language as tl

from hisparsed.kernels.state import COUNTERS, GHOST_BINS, OCTILES
from hisparsed.kernels.triton_language import (
    CAPACITY_OUTSIDE,
    HOT_BLOCKS_MISSING,
    LOADED,
    MISSING,
    OPEN,
    REQUEST_OUTSIDE,
    SAMPLED,
    STATE_OUTSIDE,
    STATE_TWICE,
    TAKEN,
    TALLIES,
    jit,
    kernel,
    latch_error,
    leading_blocks,
    ones_in,
    selected_bit,
)
from hisparsed.kernels.triton_sample import move_ghosts
from hisparsed.kernels.triton_select import cut_off, load_slots
from hisparsed.kernels.triton_union import (
    clear_words,
    list_misses,
    list_union,
    own_run,
    rank_words,
    select_cells,
)

_COUNTERS = tl.constexpr(len(COUNTERS))
_OCTILES = tl.constexpr(OCTILES)
_BINS = tl.constexpr(GHOST_BINS + 1)


@kernel("rows", "requests")
def plan(
    topk: tl.tensor,
    request_ids: tl.tensor,
    state_of_request: tl.tensor,
    source_table: tl.tensor,
    resident_table: tl.tensor,
    hot_table: tl.tensor,
    slot_pos: tl.tensor,
    slot_stamp: tl.tensor,
    capacity: tl.tensor,
    step: tl.tensor,
    counters: tl.tensor,
    octile: tl.tensor,
    octile_misses: tl.tensor,
    ghost_pos: tl.tensor,
    ghost: tl.tensor,
    clock: tl.tensor,
    physical_rows: tl.tensor,
    valid_counts: tl.tensor,
    swap_host: tl.tensor,
    swap_physical: tl.tensor,
    first_row: tl.tensor,
    spills: tl.tensor,
    tally: tl.tensor,
    bits: tl.tensor,
    ranks: tl.tensor,
    positions: tl.tensor,
    places: tl.tensor,
    misses: tl.tensor,
    old_pos: tl.tensor,
    old_stamp: tl.tensor,
    old_ghosts: tl.tensor,
    latch: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    requests: tl.tensor,
    num_states: tl.tensor,
    source_pages: tl.tensor,
    source_stride: tl.tensor,
    resident_pages: tl.tensor,
    resident_stride: tl.tensor,
    hot_pages: tl.tensor,
    hot_stride: tl.tensor,
    host_rows: tl.tensor,
    max_capacity: tl.tensor,
    max_positions: tl.tensor,
    word_stride: tl.tensor,
    ghosts: tl.tensor,
    sample_period: tl.tensor,
    block_size: tl.constexpr,
    resident_by_state: tl.constexpr,
    ghost_every: tl.constexpr,
    turn: tl.constexpr,
    slots: tl.constexpr,
    chunk: tl.constexpr,
) -> None:
    """One program per row; the first row of a run plans for the run.

    An impossible value is latched, and its request is answered as if it had no rows on the host;
    the others continue.
    """
    row = tl.program_id(0)
    tl.store(valid_counts + row, 0)
    tl.store(spills + row, 0)
    request = tl.load(request_ids + row)
    known = (request >= 0) & (request < requests)
    state = tl.load(state_of_request + request, mask=known, other=-1)
    if (state < 0) | (state >= num_states):
        tl.store(first_row + row, -1)
        if request >= requests:
            latch_error(latch, REQUEST_OUTSIDE, row, request, 0, 0, 0)
        elif state >= num_states:
            latch_error(latch, STATE_OUTSIDE, request, state, num_states, 0, 0)
        return
    if tl.load(request_ids + row - 1, mask=row > 0, other=-1) == request:
        return
    end, sharing = own_run(
        row, request, state, request_ids, state_of_request, rows, requests, chunk
    )
    alone = sharing == end - row
    for base in range(row, end, chunk):
        other = base + tl.arange(0, chunk)
        tl.store(first_row + other, tl.where(alone, row, -1), mask=other < end)
    if sharing != end - row:
        latch_error(latch, STATE_TWICE, state, request, 0, 0, 0)
        return

    request = request.to(tl.int64)
    state = state.to(tl.int64)
    cells = (end - row) * width
    first_cell = row.to(tl.int64) * width
    topk += first_cell
    physical_rows += first_cell
    positions += first_cell
    places += first_cell
    misses += first_cell
    bits += state * word_stride
    ranks += state * word_stride
    source_table += request * source_stride
    hot_table += request * hot_stride
    owner = state if resident_by_state else request

    used_words = clear_words(topk, bits, cells, max_positions, turn)
    tl.debug_barrier()
    references, residents = select_cells(
        topk,
        source_table,
        resident_table + owner * resident_stride,
        physical_rows,
        bits,
        cells,
        source_pages,
        resident_pages,
        host_rows,
        max_positions,
        block_size,
        turn,
    )
    usable = tl.load(capacity + state)
    exists = (usable >= 0) & (usable <= max_capacity)
    leased = leading_blocks(hot_table, hot_pages, chunk)
    fits = exists & (leased.to(tl.int64) * block_size >= usable)
    backed = references > residents
    tallies = tally + row * TALLIES
    tl.store(tallies + OPEN, (backed & fits).to(tl.int32))
    counted = counters + state * _COUNTERS
    if backed & fits:
        slot_pos += state * max_capacity
        slot_stamp += state * max_capacity
        old_pos += state * max_capacity
        old_stamp += state * max_capacity
        now = tl.load(step + state) + 1
        due = tl.load(clock) % sample_period == 0
        tl.debug_barrier()
        union = rank_words(bits, ranks, used_words, turn)
        tl.debug_barrier()
        list_union(topk, physical_rows, bits, ranks, positions, places, cells, turn)
        tl.debug_barrier()
        hits, empty, low, high, highest = _find_hits(
            slot_pos,
            slot_stamp,
            old_pos,
            old_stamp,
            bits,
            ranks,
            places,
            usable,
            used_words,
            now,
            due,
            slots,
        )
        move_ghosts(
            positions,
            bits,
            ghost_pos + state * ghosts,
            old_ghosts + state * ghosts,
            ghost + state * _BINS,
            union,
            used_words,
            ghosts,
            max_capacity,
            due,
            ghost_every,
            chunk,
        )
        tl.debug_barrier()
        missing = list_misses(places, misses, union, turn)
        taken = tl.minimum(missing, usable - hits)
        tl.debug_barrier()
        if taken > 0:
            edge = -1
            edge_position = -1
            if taken > empty:
                edge, edge_position = cut_off(
                    slot_pos, slot_stamp, usable, now, taken - empty, low, high, highest, slots
                )
                tl.debug_barrier()
            _fill(
                source_table,
                hot_table,
                slot_pos,
                slot_stamp,
                positions,
                places,
                misses,
                swap_host + first_cell,
                swap_physical + first_cell,
                usable,
                now,
                taken,
                edge,
                edge_position,
                block_size,
                slots,
            )
        tl.store(step + state, now)
        tl.store(spills + row, missing - taken)
        tl.store(tallies + TAKEN, taken)
        tl.store(tallies + MISSING, missing)
        tl.store(tallies + SAMPLED, due.to(tl.int32))
        tl.store(counted + 2, tl.load(counted + 2) + hits)
        tl.store(counted + 3, tl.load(counted + 3) + taken)
        if due:
            tl.store(octile + state * _OCTILES, tl.load(octile + state * _OCTILES) + hits)
            tl.store(octile_misses + state, tl.load(octile_misses + state) + missing)
    elif backed:
        if exists:
            needed = (usable + block_size - 1) // block_size
            latch_error(latch, HOT_BLOCKS_MISSING, state, request, usable, needed, leased)
        else:
            latch_error(latch, CAPACITY_OUTSIDE, state, usable, max_capacity, 0, 0)
    if fits | (references == residents):
        tl.store(counted, tl.load(counted) + references)
        tl.store(counted + 1, tl.load(counted + 1) + residents)


@jit
def _find_hits(
    slot_pos: tl.tensor,
    slot_stamp: tl.tensor,
    old_pos: tl.tensor,
    old_stamp: tl.tensor,
    bits: tl.tensor,
    ranks: tl.tensor,
    places: tl.tensor,
    capacity: tl.tensor,
    used_words: tl.tensor,
    now: tl.tensor,
    due: tl.tensor,
    slots: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Stamp every slot that holds a selected position, and record where its rank is.

    Returns how many those are, how many slots are empty, and of the others the lowest and highest
    stamp and the highest position. A sampled step keeps the slots as they were, hits with
    negative stamps.
    """
    hits = 0
    empty = 0
    low = 2147483647
    high = 0
    highest = 0
    for base in range(0, capacity, slots):
        slot, position, stamp = load_slots(slot_pos, slot_stamp, capacity, base, slots)
        hit, word, known = selected_bit(position, bits, used_words)
        below = ones_in(word & ((1 << (known % 32)) - 1))
        rank = tl.load(ranks + known // 32, mask=hit, other=0) + below
        tl.store(places + rank, slot, mask=hit)
        if due:
            tl.store(old_pos + slot, position, mask=slot < capacity)
            tl.store(old_stamp + slot, tl.where(hit, -stamp, stamp), mask=slot < capacity)
        tl.store(slot_stamp + slot, now, mask=hit)
        stale = (position >= 0) & (hit == 0)
        hits += tl.sum(hit.to(tl.int32), axis=0)
        empty += tl.sum((position == -1).to(tl.int32), axis=0)
        low = tl.minimum(low, tl.min(tl.where(stale, stamp, 2147483647), axis=0))
        high = tl.maximum(high, tl.max(tl.where(stale, stamp, 0), axis=0))
        highest = tl.maximum(highest, tl.max(tl.where(stale, position, 0), axis=0))
    return hits, empty, low, high, highest


@jit
def _fill(
    source_table: tl.tensor,
    hot_table: tl.tensor,
    slot_pos: tl.tensor,
    slot_stamp: tl.tensor,
    positions: tl.tensor,
    places: tl.tensor,
    misses: tl.tensor,
    swap_host: tl.tensor,
    swap_physical: tl.tensor,
    capacity: tl.tensor,
    now: tl.tensor,
    taken: tl.tensor,
    edge: tl.tensor,
    edge_position: tl.tensor,
    block_size: tl.constexpr,
    slots: tl.constexpr,
) -> None:
    """Give the i-th chosen slot to the i-th miss, both ascending."""
    before = 0
    for base in range(0, capacity, slots):
        slot, position, stamp = load_slots(slot_pos, slot_stamp, capacity, base, slots)
        stale = (stamp < edge) | ((stamp == edge) & (position <= edge_position))
        stale = stale & (position >= 0) & (stamp != now)
        victim = stale | (position == -1)
        index = before + tl.cumsum(victim.to(tl.int32), axis=0) - 1
        chosen = victim & (index < taken)
        before += tl.sum(victim.to(tl.int32), axis=0)

        rank = tl.load(misses + index, mask=chosen, other=0)
        new = tl.load(positions + rank, mask=chosen, other=0)
        tl.store(places + rank, slot + LOADED, mask=chosen)
        tl.store(slot_pos + slot, new, mask=chosen)
        tl.store(slot_stamp + slot, now, mask=chosen)
        source = tl.load(source_table + new // block_size, mask=chosen, other=0).to(tl.int64)
        hot = tl.load(hot_table + slot // block_size, mask=chosen, other=0).to(tl.int64)
        tl.store(swap_host + index, source * block_size + new % block_size, mask=chosen)
        tl.store(swap_physical + index, hot * block_size + slot % block_size, mask=chosen)
