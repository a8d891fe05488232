"""First half of a Triton step: find the runs, then look up every cell. Writes no resolver state.

Between the kernels of a step a cell's physical row says what was found: a resident row, or one
of the marks nowhere, hit and miss. Hits and misses of a run are collected as sets.
"""

from __future__ import annotations

import triton.language as tl

from hisparsed.kernels.triton_language import (
    HIT,
    LEASED,
    MISS,
    NOWHERE,
    REFERENCES,
    REQUEST_OUTSIDE,
    RESIDENT,
    STATE_OUTSIDE,
    STATE_TWICE,
    TALLIES,
    jit,
    kernel,
    latch_error,
    leading_blocks,
)


@jit
def _owner(
    row: tl.tensor,
    rows: tl.tensor,
    request_ids: tl.tensor,
    requests: tl.tensor,
    state_of_request: tl.tensor,
    num_states: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Request and state row of each row, and whether they exist."""
    request = tl.load(request_ids + row, mask=(row >= 0) & (row < rows), other=-1)
    known = (request >= 0) & (request < requests)
    state = tl.load(state_of_request + request, mask=known, other=-1)
    return request, state, (state >= 0) & (state < num_states)


@kernel("rows", "requests")
def find_runs(
    request_ids: tl.tensor,
    state_of_request: tl.tensor,
    claim: tl.tensor,
    first_row: tl.tensor,
    spills: tl.tensor,
    tally: tl.tensor,
    latch: tl.tensor,
    rows: tl.tensor,
    requests: tl.tensor,
    num_states: tl.tensor,
    chunk: tl.constexpr,
) -> None:
    """One program: first row of every row's run, -1 for padding and for all after an error.

    Each run writes its first row to its state row's claim and reads it back: two runs of one
    state row cannot both find their own.
    """
    nothing = 2147483647
    unknown = nothing
    outside = nothing
    for base in range(0, rows, chunk):
        row = base + tl.arange(0, chunk)
        request, state, live = _owner(
            row, rows, request_ids, requests, state_of_request, num_states
        )
        before, _, live_before = _owner(
            row - 1, rows, request_ids, requests, state_of_request, num_states
        )
        starts = live & ((request != before) | (live_before == 0))
        unknown = tl.minimum(unknown, tl.min(tl.where(request >= requests, row, nothing), axis=0))
        outside = tl.minimum(outside, tl.min(tl.where(state >= num_states, row, nothing), axis=0))
        tl.store(claim + state, row, mask=starts)
        for column in range(TALLIES):
            tl.store(tally + state * TALLIES + column, 0, mask=starts)
        tl.store(spills + row, 0, mask=row < rows)
    tl.debug_barrier()
    twice = nothing
    for base in range(0, rows, chunk):
        row = base + tl.arange(0, chunk)
        request, state, live = _owner(
            row, rows, request_ids, requests, state_of_request, num_states
        )
        before, _, live_before = _owner(
            row - 1, rows, request_ids, requests, state_of_request, num_states
        )
        starts = live & ((request != before) | (live_before == 0))
        first = tl.load(claim + state, mask=live, other=-1)
        twice = tl.minimum(twice, tl.min(tl.where(starts & (first != row), row, nothing), axis=0))
        tl.store(first_row + row, first, mask=row < rows)
    bad = tl.minimum(unknown, tl.minimum(outside, twice))
    if bad < nothing:
        tl.debug_barrier()
        for base in range(0, rows, chunk):
            row = base + tl.arange(0, chunk)
            tl.store(first_row + row, -1, mask=row < rows)
        if unknown < nothing:
            request = tl.load(request_ids + unknown)
            latch_error(latch, REQUEST_OUTSIDE, unknown, request, 0, 0, 0)
        elif outside < nothing:
            request = tl.load(request_ids + outside)
            state = tl.load(state_of_request + request)
            latch_error(latch, STATE_OUTSIDE, request, state, num_states, 0, 0)
        else:
            request = tl.load(request_ids + twice)
            state = tl.load(state_of_request + request)
            latch_error(latch, STATE_TWICE, state, request, 0, 0, 0)


@kernel()
def classify(
    topk: tl.tensor,
    request_ids: tl.tensor,
    state_of_request: tl.tensor,
    source_table: tl.tensor,
    resident_table: tl.tensor,
    hot_table: tl.tensor,
    pos_slot: tl.tensor,
    physical_rows: tl.tensor,
    valid_counts: tl.tensor,
    first_row: tl.tensor,
    touched: tl.tensor,
    miss_bits: tl.tensor,
    tally: tl.tensor,
    width: tl.tensor,
    source_pages: tl.tensor,
    source_stride: tl.tensor,
    resident_pages: tl.tensor,
    resident_stride: tl.tensor,
    hot_pages: tl.tensor,
    hot_stride: tl.tensor,
    host_rows: tl.tensor,
    max_capacity: tl.tensor,
    max_positions: tl.tensor,
    miss_words: tl.tensor,
    block_size: tl.constexpr,
    resident_by_state: tl.constexpr,
    cells: tl.constexpr,
    chunk: tl.constexpr,
) -> None:
    """One program per row and ``cells`` of its positions."""
    row = tl.program_id(0)
    tl.store(valid_counts + row, 0)
    first = tl.load(first_row + row)
    if first < 0:
        return
    request = tl.load(request_ids + row).to(tl.int64)
    state = tl.load(state_of_request + request).to(tl.int64)
    column = tl.program_id(1) * cells + tl.arange(0, cells)
    cell = row.to(tl.int64) * width + column
    position = tl.load(topk + cell, mask=column < width, other=-1)
    real = position >= 0
    page = tl.where(real, position, 0) // block_size
    offset = tl.where(real, position, 0) % block_size

    owner = state if resident_by_state else request
    block = tl.load(
        resident_table + owner * resident_stride + page,
        mask=real & (page < resident_pages),
        other=0,
    )
    resident = block > 0
    source = tl.load(
        source_table + request * source_stride + page,
        mask=real & (block <= 0) & (position < max_positions) & (page < source_pages),
        other=0,
    )
    backed = (source > 0) & (source.to(tl.int64) * block_size + offset < host_rows)
    slot = tl.load(pos_slot + state * max_positions + position, mask=backed, other=-1).to(tl.int32)
    hit = backed & (slot >= 0)
    miss = backed & (slot < 0)
    tl.store(touched + state * max_capacity + slot, 1, mask=hit)
    bit = tl.full([cells], 1, tl.int32) << (position % 32)
    tl.atomic_or(miss_bits + state * miss_words + position // 32, bit, mask=miss, sem="relaxed")
    found = tl.where(resident, block.to(tl.int64) * block_size + offset, NOWHERE)
    found = tl.where(hit, HIT, tl.where(miss, MISS, found))
    tl.store(physical_rows + cell, found, mask=column < width)

    residents = tl.sum(resident.to(tl.int32), axis=0)
    references = residents + tl.sum(backed.to(tl.int32), axis=0)
    tallies = tally + state * TALLIES
    tl.atomic_add(tallies + REFERENCES, references, sem="relaxed")
    tl.atomic_add(tallies + RESIDENT, residents, sem="relaxed")
    if (tl.program_id(1) == 0) & (first == row):
        leased = leading_blocks(hot_table + request * hot_stride, hot_pages, chunk)
        tl.store(tallies + LEASED, leased)
