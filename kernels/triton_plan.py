"""The plan of a Triton step: ranks the misses of a run, picks their slots, advances its state.

The only kernel that writes slots, maps and counters. It leaves the sets of hits and misses
empty for the next step, which may come without the host ever looking.
"""

from __future__ import annotations

import triton.language as tl

from hisparsed.kernels.state import COUNTERS, OCTILES
from hisparsed.kernels.triton_language import (
    CAPACITY_OUTSIDE,
    HOT_BLOCKS_MISSING,
    LEASED,
    MISS,
    MISSING,
    OPEN,
    REFERENCES,
    RESIDENT,
    TAKEN,
    TALLIES,
    jit,
    kernel,
    latch_error,
    ones_in,
    rank_of,
)
from hisparsed.kernels.triton_select import cut_off, load_slots

_COUNTERS = tl.constexpr(len(COUNTERS))
_OCTILES = tl.constexpr(OCTILES)


@kernel("rows")
def plan(
    topk: tl.tensor,
    request_ids: tl.tensor,
    state_of_request: tl.tensor,
    source_table: tl.tensor,
    hot_table: tl.tensor,
    slot_pos: tl.tensor,
    slot_stamp: tl.tensor,
    pos_slot: tl.tensor,
    capacity: tl.tensor,
    step: tl.tensor,
    counters: tl.tensor,
    octile: tl.tensor,
    octile_misses: tl.tensor,
    physical_rows: tl.tensor,
    swap_host: tl.tensor,
    swap_physical: tl.tensor,
    first_row: tl.tensor,
    spills: tl.tensor,
    touched: tl.tensor,
    miss_bits: tl.tensor,
    words: tl.tensor,
    ranks: tl.tensor,
    misses: tl.tensor,
    tally: tl.tensor,
    latch: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    source_stride: tl.tensor,
    hot_stride: tl.tensor,
    max_capacity: tl.tensor,
    max_positions: tl.tensor,
    miss_words: tl.tensor,
    used_words: tl.tensor,
    sample_period: tl.tensor,
    block_size: tl.constexpr,
    slots: tl.constexpr,
    turn: tl.constexpr,
    chunk: tl.constexpr,
) -> None:
    """One program per row; the first row of a run plans for the run."""
    row = tl.program_id(0)
    if tl.load(first_row + row) != row:
        return
    request = tl.load(request_ids + row).to(tl.int64)
    state = tl.load(state_of_request + request).to(tl.int64)
    tallies = tally + state * TALLIES
    references = tl.load(tallies + REFERENCES)
    resident = tl.load(tallies + RESIDENT)
    counted = counters + state * _COUNTERS
    usable = tl.load(capacity + state)
    leased = tl.load(tallies + LEASED)
    slot_pos += state * max_capacity
    slot_stamp += state * max_capacity
    pos_slot += state * max_positions
    touched += state * max_capacity
    words += state * miss_words
    ranks += state * miss_words
    misses += state * max_capacity
    exists = (usable >= 0) & (usable <= max_capacity)
    fits = exists & (leased.to(tl.int64) * block_size >= usable)
    if references > resident:
        missing = _rank_misses(miss_bits + state * miss_words, words, ranks, used_words, turn)
        if fits:
            now = tl.load(step + state) + 1
            hits = 0
            empty = 0
            for base in range(0, usable, slots):
                _, position, _, used = load_slots(
                    slot_pos, slot_stamp, touched, usable, base, slots
                )
                hits += tl.sum((used > 0).to(tl.int32), axis=0)
                empty += tl.sum((position == -1).to(tl.int32), axis=0)
            taken = tl.minimum(missing, usable - hits)
            edge = -1
            edge_position = -1
            if taken > empty:
                edge, edge_position = cut_off(
                    slot_pos,
                    slot_stamp,
                    touched,
                    usable,
                    max_positions,
                    taken - empty,
                    True,
                    slots,
                )
            tl.debug_barrier()
            if taken > 0:
                _list_misses(
                    topk,
                    physical_rows,
                    first_row,
                    row,
                    rows,
                    width,
                    words,
                    ranks,
                    misses,
                    taken,
                    chunk,
                    turn,
                )
            tl.debug_barrier()
            _fill(
                source_table + request * source_stride,
                hot_table + request * hot_stride,
                slot_pos,
                slot_stamp,
                pos_slot,
                touched,
                misses,
                swap_host + row.to(tl.int64) * width,
                swap_physical + row.to(tl.int64) * width,
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
            tl.store(tallies + OPEN, 1)
            tl.store(tallies + TAKEN, taken)
            tl.store(tallies + MISSING, missing)
            tl.store(counted + 2, tl.load(counted + 2) + hits)
            tl.store(counted + 3, tl.load(counted + 3) + taken)
            if now % sample_period == 0:
                tl.store(octile + state * _OCTILES, tl.load(octile + state * _OCTILES) + hits)
                tl.store(octile_misses + state, tl.load(octile_misses + state) + missing)
        else:
            for base in range(0, max_capacity, slots):
                slot = base + tl.arange(0, slots)
                tl.store(touched + slot, 0, mask=slot < max_capacity)
            if exists:
                needed = (usable + block_size - 1) // block_size
                latch_error(latch, HOT_BLOCKS_MISSING, state, request, usable, needed, leased)
            else:
                latch_error(latch, CAPACITY_OUTSIDE, state, usable, max_capacity, 0, 0)
    if fits | (references == resident):
        tl.store(counted, tl.load(counted) + references)
        tl.store(counted + 1, tl.load(counted + 1) + resident)


@jit
def _rank_misses(
    bits: tl.tensor, words: tl.tensor, ranks: tl.tensor, used_words: tl.tensor, turn: tl.constexpr
) -> tl.tensor:
    """Empty the bitmap into words and the misses below each word; returns how many there are."""
    missing = 0
    for base in range(0, used_words, turn):
        index = base + tl.arange(0, turn)
        word = tl.load(bits + index, mask=index < used_words, other=0)
        ones = ones_in(word)
        # Words without a miss keep what they had: only turn that missed look here.
        tl.store(words + index, word, mask=word != 0)
        tl.store(ranks + index, missing + tl.cumsum(ones, axis=0) - ones, mask=word != 0)
        tl.store(bits + index, 0, mask=word != 0)
        missing += tl.sum(ones, axis=0)
    return missing


@jit
def _list_misses(
    topk: tl.tensor,
    physical_rows: tl.tensor,
    first_row: tl.tensor,
    row: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    words: tl.tensor,
    ranks: tl.tensor,
    misses: tl.tensor,
    taken: tl.tensor,
    chunk: tl.constexpr,
    turn: tl.constexpr,
) -> None:
    """Positions of the misses that get a slot, ascending; duplicates write the same word."""
    own_rows = 0
    for base in range(0, rows, chunk):
        other = base + tl.arange(0, chunk)
        first = tl.load(first_row + other, mask=other < rows, other=-1)
        own_rows += tl.sum((first == row).to(tl.int32), axis=0)
    start = row.to(tl.int64) * width
    for base in range(0, own_rows * width, turn):
        index = base + tl.arange(0, turn)
        mark = tl.load(physical_rows + start + index, mask=index < own_rows * width, other=0)
        missed = mark == MISS
        position = tl.load(topk + start + index, mask=missed, other=0)
        rank = rank_of(position, words, ranks, missed)
        tl.store(misses + rank, position, mask=missed & (rank < taken))


@jit
def _fill(
    source_table: tl.tensor,
    hot_table: tl.tensor,
    slot_pos: tl.tensor,
    slot_stamp: tl.tensor,
    pos_slot: tl.tensor,
    touched: tl.tensor,
    misses: tl.tensor,
    swap_host: tl.tensor,
    swap_physical: tl.tensor,
    usable: tl.tensor,
    now: tl.tensor,
    taken: tl.tensor,
    edge: tl.tensor,
    edge_position: tl.tensor,
    block_size: tl.constexpr,
    slots: tl.constexpr,
) -> None:
    """Stamp the hits; give the i-th chosen slot to the i-th miss, both ascending."""
    before = 0
    for base in range(0, usable, slots):
        slot, position, stamp, used = load_slots(slot_pos, slot_stamp, touched, usable, base, slots)
        stale = (stamp < edge) | ((stamp == edge) & (position <= edge_position))
        stale = stale & (position >= 0) & (used == 0)
        victim = stale | (position == -1)
        place = before + tl.cumsum(victim.to(tl.int32), axis=0) - 1
        chosen = victim & (place < taken)
        before += tl.sum(victim.to(tl.int32), axis=0)

        new = tl.load(misses + place, mask=chosen, other=0)
        tl.store(pos_slot + position, -1, mask=chosen & (position >= 0))
        tl.store(slot_pos + slot, new, mask=chosen)
        tl.store(slot_stamp + slot, now, mask=chosen | (used > 0))
        tl.store(pos_slot + new, slot.to(tl.int16), mask=chosen)
        tl.store(touched + slot, 0, mask=used > 0)

        source = tl.load(source_table + new // block_size, mask=chosen, other=0).to(tl.int64)
        hot = tl.load(hot_table + slot // block_size, mask=chosen, other=0).to(tl.int64)
        tl.store(swap_host + place, source * block_size + new % block_size, mask=chosen)
        tl.store(swap_physical + place, hot * block_size + slot % block_size, mask=chosen)
