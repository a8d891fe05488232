"""Second kernel of a Triton step: turns the marks into rows, deals scratch, writes the outputs.

Every cell looks up the place of its position; what has no slot reads a scratch row or nothing. In a
sampled step the same programs count the octiles.
"""

from __future__ import annotations

import triton.language as tl

from hisparsed.kernels.state import COUNTERS, OCTILES
from hisparsed.kernels.triton_language import (
    BACKED,
    LOADED,
    MISSING,
    NOWHERE,
    OPEN,
    SAMPLED,
    TAKEN,
    TALLIES,
    kernel,
    leading_blocks,
    rank_of,
)
from hisparsed.kernels.triton_sample import count_deeper

_COUNTERS = tl.constexpr(len(COUNTERS))
_OCTILES = tl.constexpr(OCTILES)


@kernel("scratch_blocks")
def finalise(
    topk: tl.tensor,
    request_ids: tl.tensor,
    state_of_request: tl.tensor,
    source_table: tl.tensor,
    hot_table: tl.tensor,
    scratch_table: tl.tensor,
    capacity: tl.tensor,
    step: tl.tensor,
    counters: tl.tensor,
    octile: tl.tensor,
    physical_rows: tl.tensor,
    attention_indices: tl.tensor,
    valid_counts: tl.tensor,
    miss_mask: tl.tensor,
    swap_host: tl.tensor,
    swap_physical: tl.tensor,
    swap_counts: tl.tensor,
    first_row: tl.tensor,
    spills: tl.tensor,
    tally: tl.tensor,
    bits: tl.tensor,
    ranks: tl.tensor,
    places: tl.tensor,
    old_pos: tl.tensor,
    old_stamp: tl.tensor,
    width: tl.tensor,
    source_stride: tl.tensor,
    hot_stride: tl.tensor,
    scratch_blocks: tl.tensor,
    attention_block_stride: tl.tensor,
    max_capacity: tl.tensor,
    word_stride: tl.tensor,
    block_size: tl.constexpr,
    part_cells: tl.constexpr,
    part_slots: tl.constexpr,
    chunk: tl.constexpr,
) -> None:
    """One program per row and ``part_cells`` of its positions."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    column = part * part_cells + tl.arange(0, part_cells)
    inside = column < width
    cell = row.to(tl.int64) * width + column
    index_type = attention_indices.dtype.element_ty
    first = tl.load(first_row + row)
    if first < 0:
        tl.store(physical_rows + cell, NOWHERE, mask=inside)
        tl.store(attention_indices + cell, NOWHERE, mask=inside)
        tl.store(miss_mask + cell, 0, mask=inside)
        if part == 0:
            tl.store(swap_counts + row, 0)
        return
    request = tl.load(request_ids + row).to(tl.int64)
    state = tl.load(state_of_request + request).to(tl.int64)
    first_cell = first.to(tl.int64) * width
    tallies = tally + first * TALLIES
    found = tl.load(physical_rows + cell, mask=inside, other=NOWHERE)
    backed = found == BACKED
    # A refused request has no place for rows that are not resident.
    physical = tl.where(backed, NOWHERE, found)
    missed = inside & (column < 0)
    taken = 0
    start = 0
    stored = 0
    spilled = 0
    opened = tl.load(tallies + OPEN)
    if opened != 0:
        taken = tl.load(tallies + TAKEN)
        spilled = tl.load(tallies + MISSING) - taken
        if spilled > 0:
            for base in range(0, first, chunk):
                other = base + tl.arange(0, chunk)
                start += tl.sum(tl.load(spills + other, mask=other < first, other=0), axis=0)
            blocks = leading_blocks(scratch_table, scratch_blocks, chunk).to(tl.int64)
            rest = tl.minimum(blocks * block_size - start, spilled)
            stored = tl.maximum(rest, 0).to(tl.int32)

        position = tl.load(topk + cell, mask=backed, other=0)
        bits += state * word_stride
        ranks += state * word_stride
        rank = rank_of(position, bits, ranks, backed)
        place = tl.load(places + first_cell + rank, mask=backed, other=-1)
        held = place >= 0
        missed = backed & ((place < 0) | (place >= LOADED))
        slot = place & (LOADED - 1)
        hot = tl.load(hot_table + request * hot_stride + slot // block_size, mask=held, other=0)
        index = -1 - place - taken
        spill = backed & (place < 0) & (index < stored)
        scratch_row = start + index
        scratch = tl.load(scratch_table + scratch_row // block_size, mask=spill, other=0)
        block = tl.where(held, hot, scratch).to(tl.int64)
        offset = tl.where(held, slot, scratch_row) % block_size
        moved = block * block_size + offset
        source = tl.load(
            source_table + request * source_stride + position // block_size, mask=spill, other=0
        )
        swap = first_cell + taken + index
        host_row = source.to(tl.int64) * block_size + position % block_size
        tl.store(swap_host + swap, host_row, mask=spill)
        tl.store(swap_physical + swap, moved, mask=spill)
        physical = tl.where(held | spill, moved, physical)

    valid = physical >= 0
    attention = physical // block_size * attention_block_stride + physical % block_size
    attention = tl.where(valid, attention, NOWHERE).to(index_type)
    tl.store(physical_rows + cell, physical, mask=inside)
    tl.store(attention_indices + cell, attention, mask=inside)
    tl.store(miss_mask + cell, (missed & valid).to(tl.uint8), mask=inside)
    tl.atomic_add(valid_counts + row, tl.sum(valid.to(tl.int32), axis=0), sem="relaxed")
    if part == 0:
        rest = taken + stored - (row - first) * width
        tl.store(swap_counts + row, tl.minimum(tl.maximum(rest, 0), width))
    if (first == row) & (opened != 0):
        if part == 0:
            counted = counters + state * _COUNTERS
            tl.store(counted + 4, tl.load(counted + 4) + stored)
            tl.store(counted + 5, tl.load(counted + 5) + spilled - stored)
        if tl.load(tallies + SAMPLED) != 0:
            slots_before = state * max_capacity
            for eighth in range(part + 1, _OCTILES, tl.num_programs(1)):
                count_deeper(
                    old_pos + slots_before,
                    old_stamp + slots_before,
                    octile + state * _OCTILES,
                    tl.load(capacity + state),
                    tl.load(step + state),
                    eighth,
                    part_slots,
                )
