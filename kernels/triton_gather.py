"""The row gather on a GPU: one list of copies across all requests, dealt to a fixed grid.

Host rows are read in place through pinned memory. The grid does not depend on how many rows
there are, so that a captured graph serves every step.
"""

from __future__ import annotations

import triton.language as tl

from hisparsed.kernels.triton_language import (
    SWAP_COUNT_OUTSIDE,
    SWAP_ROW_OUTSIDE,
    kernel,
    latch_error,
)


@kernel("rows")
def gather_rows(
    host: tl.tensor,
    slab: tl.tensor,
    swap_host: tl.tensor,
    swap_physical: tl.tensor,
    swap_counts: tl.tensor,
    layer_offsets: tl.tensor,
    latch: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    layers: tl.tensor,
    host_rows: tl.tensor,
    slab_rows: tl.tensor,
    host_block_words: tl.tensor,
    slab_block_words: tl.tensor,
    block_size: tl.constexpr,
    row_words: tl.constexpr,
    word_bytes: tl.constexpr,
    aligned_words: tl.constexpr,
    padded_words: tl.constexpr,
    entries: tl.constexpr,
    chunk: tl.constexpr,
) -> None:
    """Program ``p`` of ``n`` copies entries ``p * entries`` onwards of every ``n * entries``.

    ``layer_offsets`` int64 [2, layers] counts words: host, then slab. Entries outside the memory
    are omitted on every layer and latched, and so are all entries of a row with an impossible
    count.
    """
    if word_bytes == 4:
        host = host.to(tl.pointer_type(tl.int32), bitcast=True)
        slab = slab.to(tl.pointer_type(tl.int32), bitcast=True)
    word = tl.arange(0, padded_words)
    for base in range(0, rows, chunk):
        row = base + tl.arange(0, chunk)
        counts = tl.load(swap_counts + row, mask=row < rows, other=0)
        wrong = (counts < 0) | (counts > width)
        if tl.max(wrong.to(tl.int32), axis=0) > 0:
            worst = tl.max(tl.where(wrong, row, -1), axis=0)
            count = tl.sum(tl.where(row == worst, counts, 0), axis=0)
            latch_error(latch, SWAP_COUNT_OUTSIDE, worst, count, width, 0, 0)
        counts = tl.where(wrong, 0, counts)
        ends = tl.cumsum(counts, axis=0)
        total = tl.sum(counts, axis=0)
        begin = tl.program_id(0) * entries
        for start in range(begin, total, tl.num_programs(0) * entries):
            item = start + tl.arange(0, entries)
            passed = ends[None, :] <= item[:, None]
            skipped = tl.sum(passed.to(tl.int32), axis=1)
            before = tl.sum(tl.where(passed, counts[None, :], 0), axis=1)
            cell = (base + skipped).to(tl.int64) * width + (item - before)
            source = tl.load(swap_host + cell, mask=item < total, other=0)
            target = tl.load(swap_physical + cell, mask=item < total, other=0)
            inside = (source >= 0) & (source < host_rows)
            inside = inside & (target >= 0) & (target < slab_rows)
            outside = (item < total) & (inside == 0)
            if tl.max(outside.to(tl.int32), axis=0) > 0:
                worst = tl.max(tl.where(outside, item, -1), axis=0)
                source_row = tl.sum(tl.where(item == worst, source, 0), axis=0)
                target_row = tl.sum(tl.where(item == worst, target, 0), axis=0)
                latch_error(
                    latch, SWAP_ROW_OUTSIDE, source_row, target_row, host_rows, slab_rows, 0
                )
            copied = (item < total) & inside
            from_word = source // block_size * host_block_words + source % block_size * row_words
            to_word = target // block_size * slab_block_words + target % block_size * row_words
            mask = copied[:, None] & (word[None, :] < row_words)
            for layer in range(layers):
                host_word = from_word + tl.load(layer_offsets + layer)
                slab_word = to_word + tl.load(layer_offsets + layers + layer)
                host_word = tl.multiple_of(host_word, aligned_words)
                slab_word = tl.multiple_of(slab_word, aligned_words)
                data = tl.load(host + host_word[:, None] + word[None, :], mask=mask, other=0)
                tl.store(slab + slab_word[:, None] + word[None, :], data, mask=mask)
