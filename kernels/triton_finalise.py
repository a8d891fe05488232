"""Last kernel of a Triton step: turns the marks into rows, deals scratch, writes the outputs.

Every cell looks up where its position is now; what has no slot reads a scratch row or nothing.
"""

from __future__ import annotations

import triton.language as tl

from hisparsed.kernels.state import COUNTERS
from hisparsed.kernels.triton_language import (
    HIT,
    MISS,
    MISSING,
    NOWHERE,
    OPEN,
    TAKEN,
    TALLIES,
    is_ghost,
    kernel,
    leading_blocks,
    rank_of,
)

_COUNTERS = tl.constexpr(len(COUNTERS))


@kernel("scratch_blocks")
def finalise(
    topk: tl.tensor,
    request_ids: tl.tensor,
    state_of_request: tl.tensor,
    source_table: tl.tensor,
    hot_table: tl.tensor,
    scratch_table: tl.tensor,
    pos_slot: tl.tensor,
    step: tl.tensor,
    counters: tl.tensor,
    ghost_stamp: tl.tensor,
    physical_rows: tl.tensor,
    attention_indices: tl.tensor,
    valid_counts: tl.tensor,
    miss_mask: tl.tensor,
    swap_host: tl.tensor,
    swap_physical: tl.tensor,
    swap_counts: tl.tensor,
    first_row: tl.tensor,
    spills: tl.tensor,
    words: tl.tensor,
    ranks: tl.tensor,
    tally: tl.tensor,
    width: tl.tensor,
    source_stride: tl.tensor,
    hot_stride: tl.tensor,
    scratch_blocks: tl.tensor,
    attention_block_stride: tl.tensor,
    max_positions: tl.tensor,
    miss_words: tl.tensor,
    ghosts: tl.tensor,
    block_size: tl.constexpr,
    ghost_every: tl.constexpr,
    cells: tl.constexpr,
    chunk: tl.constexpr,
) -> None:
    """One program per row and ``cells`` of its positions."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    column = part * cells + tl.arange(0, cells)
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
    tallies = tally + state * TALLIES
    opened = tl.load(tallies + OPEN)
    taken = tl.load(tallies + TAKEN)
    spilled = tl.load(tallies + MISSING) - taken
    start = 0
    stored = 0
    if spilled > 0:
        for base in range(0, first, chunk):
            other = base + tl.arange(0, chunk)
            start += tl.sum(tl.load(spills + other, mask=other < first, other=0), axis=0)
        blocks = leading_blocks(scratch_table, scratch_blocks, chunk).to(tl.int64)
        rest = tl.minimum(blocks * block_size - start, spilled)
        stored = tl.maximum(rest, 0).to(tl.int32)

    position = tl.load(topk + cell, mask=inside, other=-1)
    found = tl.load(physical_rows + cell, mask=inside, other=NOWHERE)
    # A run that was refused (not opened) has no place for what is not resident.
    found = tl.where((found < 0) & (opened == 0), NOWHERE, found)
    missed = found == MISS
    backed = missed | (found == HIT)
    slot = tl.load(pos_slot + state * max_positions + position, mask=backed, other=-1).to(tl.int32)
    held = slot >= 0
    block = tl.load(hot_table + request * hot_stride + slot // block_size, mask=held, other=0)
    offset = slot % block_size

    spill = missed & (slot < 0)
    words += state * miss_words
    ranks += state * miss_words
    index = rank_of(position, words, ranks, spill) - taken
    spill = spill & (index < stored)
    place = start + index
    scratch = tl.load(scratch_table + place // block_size, mask=spill, other=0)
    block = tl.where(spill, scratch, block)
    offset = tl.where(spill, place % block_size, offset)
    moved = block.to(tl.int64) * block_size + offset
    source = tl.load(
        source_table + request * source_stride + position // block_size, mask=spill, other=0
    )
    swap = first.to(tl.int64) * width + taken + index
    host_row = source.to(tl.int64) * block_size + position % block_size
    tl.store(swap_host + swap, host_row, mask=spill)
    tl.store(swap_physical + swap, moved, mask=spill)

    physical = tl.where(held | spill, moved, tl.where(found >= 0, found, NOWHERE))
    valid = physical >= 0
    attention = physical // block_size * attention_block_stride + physical % block_size
    attention = tl.where(valid, attention, NOWHERE).to(index_type)
    tl.store(physical_rows + cell, physical, mask=inside)
    tl.store(attention_indices + cell, attention, mask=inside)
    tl.store(miss_mask + cell, (missed & valid).to(tl.uint8), mask=inside)
    tl.atomic_add(valid_counts + row, tl.sum(valid.to(tl.int32), axis=0), sem="relaxed")

    sampled = backed & is_ghost(position, ghost_every)
    group = state * ghosts + position // ghost_every
    tl.store(ghost_stamp + group, tl.load(step + state), mask=sampled)
    if part == 0:
        rest = taken + stored - (row - first) * width
        tl.store(swap_counts + row, tl.minimum(tl.maximum(rest, 0), width))
        if first == row:
            counted = counters + state * _COUNTERS
            tl.store(counted + 4, tl.load(counted + 4) + stored)
            tl.store(counted + 5, tl.load(counted + 5) + spilled - stored)
