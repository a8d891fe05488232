"""First half of a plan: a run's selected positions as one ranked set. Writes no resolver state.

The union of the run's rows is a bitmap over positions with the count below each word, so that a
position finds its rank, and by its rank what is kept of it, without a map of all positions. The
words in use follow from the highest selected position. Everything that is read here was written
in the same step, so a step that broke off leaves nothing behind.
"""

from __future__ import annotations

import triton.language as tl

from hisparsed.kernels.triton_language import BACKED, NOWHERE, jit, ones_in, rank_of


@jit
def own_run(
    row: tl.tensor,
    request: tl.tensor,
    state: tl.tensor,
    request_ids: tl.tensor,
    state_of_request: tl.tensor,
    rows: tl.tensor,
    requests: tl.tensor,
    chunk: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """First row behind the run that starts at ``row``, and rows of the step on its state row."""
    end = rows
    sharing = 0
    for base in range(0, rows, chunk):
        other = base + tl.arange(0, chunk)
        theirs = tl.load(request_ids + other, mask=other < rows, other=-1)
        ends = (other > row) & (theirs != request)
        end = tl.minimum(end, tl.min(tl.where(ends, other, rows), axis=0))
        known = (theirs >= 0) & (theirs < requests)
        owner = tl.load(state_of_request + theirs, mask=known, other=-1)
        sharing += tl.sum((owner == state).to(tl.int32), axis=0)
    return end, sharing


@jit
def clear_words(
    topk: tl.tensor,
    bits: tl.tensor,
    cells: tl.tensor,
    max_positions: tl.tensor,
    turn: tl.constexpr,
) -> tl.tensor:
    """Empty the words that the run's positions can touch; returns how many those are."""
    top = -1
    for base in range(0, cells, turn):
        index = base + tl.arange(0, turn)
        position = tl.load(topk + index, mask=index < cells, other=-1)
        top = tl.maximum(top, tl.max(tl.where(position < max_positions, position, -1), axis=0))
    used_words = (top + 32) // 32
    for base in range(0, used_words, turn):
        index = base + tl.arange(0, turn)
        tl.store(bits + index, 0, mask=index < used_words)
    return used_words


@jit
def select_cells(
    topk: tl.tensor,
    source_table: tl.tensor,
    resident_table: tl.tensor,
    physical_rows: tl.tensor,
    bits: tl.tensor,
    cells: tl.tensor,
    source_pages: tl.tensor,
    resident_pages: tl.tensor,
    host_rows: tl.tensor,
    max_positions: tl.tensor,
    block_size: tl.constexpr,
    turn: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Answer resident cells, mark and collect what the host backs; references, resident ones."""
    references = 0
    residents = 0
    for base in range(0, cells, turn):
        index = base + tl.arange(0, turn)
        position = tl.load(topk + index, mask=index < cells, other=-1)
        real = position >= 0
        page = tl.where(real, position, 0) // block_size
        offset = tl.where(real, position, 0) % block_size
        block = tl.load(resident_table + page, mask=real & (page < resident_pages), other=0)
        resident = block > 0
        source = tl.load(
            source_table + page,
            mask=real & (block <= 0) & (position < max_positions) & (page < source_pages),
            other=0,
        )
        backed = (source > 0) & (source.to(tl.int64) * block_size + offset < host_rows)
        known = tl.where(backed, position, 0)
        bit = tl.full([turn], 1, tl.int32) << (known % 32)
        tl.atomic_or(bits + known // 32, bit, mask=backed, sem="relaxed")
        found = tl.where(resident, block.to(tl.int64) * block_size + offset, NOWHERE)
        tl.store(physical_rows + index, tl.where(backed, BACKED, found), mask=index < cells)
        residents += tl.sum(resident.to(tl.int32), axis=0)
        references += tl.sum((resident | backed).to(tl.int32), axis=0)
    return references, residents


@jit
def rank_words(
    bits: tl.tensor, ranks: tl.tensor, used_words: tl.tensor, turn: tl.constexpr
) -> tl.tensor:
    """Count what lies below each word that has a bit; returns the size of the union."""
    union = 0
    for base in range(0, used_words, turn):
        index = base + tl.arange(0, turn)
        word = tl.load(bits + index, mask=index < used_words, other=0)
        ones = ones_in(word)
        tl.store(ranks + index, union + tl.cumsum(ones, axis=0) - ones, mask=word != 0)
        union += tl.sum(ones, axis=0)
    return union


@jit
def list_union(
    topk: tl.tensor,
    physical_rows: tl.tensor,
    bits: tl.tensor,
    ranks: tl.tensor,
    positions: tl.tensor,
    places: tl.tensor,
    cells: tl.tensor,
    turn: tl.constexpr,
) -> None:
    """The union by rank, none of it with a place yet; duplicates write the same words."""
    for base in range(0, cells, turn):
        index = base + tl.arange(0, turn)
        mark = tl.load(physical_rows + index, mask=index < cells, other=NOWHERE)
        backed = mark == BACKED
        position = tl.load(topk + index, mask=backed, other=0)
        rank = rank_of(position, bits, ranks, backed)
        tl.store(positions + rank, position, mask=backed)
        tl.store(places + rank, -1, mask=backed)


@jit
def list_misses(
    places: tl.tensor, misses: tl.tensor, union: tl.tensor, turn: tl.constexpr
) -> tl.tensor:
    """Number what no slot holds, ascending, in ``places`` and by rank in ``misses``."""
    missing = 0
    for base in range(0, union, turn):
        rank = base + tl.arange(0, turn)
        place = tl.load(places + rank, mask=rank < union, other=0)
        missed = place < 0
        index = missing + tl.cumsum(missed.to(tl.int32), axis=0) - 1
        tl.store(misses + index, rank, mask=missed)
        tl.store(places + rank, -1 - index, mask=missed)
        missing += tl.sum(missed.to(tl.int32), axis=0)
    return missing
