"""Octiles and ghosts of the Triton backend, from which the miss curve is made.

Ghosts move while a run is planned. Octiles are counted by the programs of the kernel after it,
side by side, from a copy of the slots as they were before the step.
"""

from __future__ import annotations

import triton.language as tl

from hisparsed.kernels.state import GHOST_BINS, OCTILES
from hisparsed.kernels.triton_language import is_ghost, jit, selected_bit
from hisparsed.kernels.triton_select import cut_off, load_slots

_OCTILES = tl.constexpr(OCTILES)
_BINS = tl.constexpr(GHOST_BINS)


@jit
def move_ghosts(
    positions: tl.tensor,
    bits: tl.tensor,
    ghost_pos: tl.tensor,
    old_ghosts: tl.tensor,
    histogram: tl.tensor,
    union: tl.tensor,
    used_words: tl.tensor,
    ghosts: tl.tensor,
    max_capacity: tl.tensor,
    due: tl.tensor,
    ghost_every: tl.constexpr,
    chunk: tl.constexpr,
) -> None:
    """Selected samples go to the front, the highest first; the last ones fall off the end."""
    for base in range(0, ghosts, chunk):
        entry = base + tl.arange(0, chunk)
        position = tl.load(ghost_pos + entry, mask=entry < ghosts, other=-1)
        tl.store(old_ghosts + entry, position, mask=entry < ghosts)
    tl.debug_barrier()
    new = tl.full((), 0, tl.int32)
    for base in range(0, union, chunk):
        rank = union - 1 - base - tl.arange(0, chunk)
        position = tl.load(positions + rank, mask=rank >= 0, other=0)
        sampled = is_ghost(position, ghost_every) & (rank >= 0)
        entry = new + tl.cumsum(sampled.to(tl.int32), axis=0) - 1
        tl.store(ghost_pos + entry, position, mask=sampled & (entry < ghosts))
        new += tl.sum(sampled.to(tl.int32), axis=0)
    alive = 0
    kept = new
    for base in range(0, ghosts, chunk):
        entry = base + tl.arange(0, chunk)
        position = tl.load(old_ghosts + entry, mask=entry < ghosts, other=-1)
        there = position >= 0
        again, _, _ = selected_bit(position, bits, used_words)
        stays = there & (again == 0)
        place = kept + tl.cumsum(stays.to(tl.int32), axis=0) - 1
        tl.store(ghost_pos + place, position, mask=stays & (place < ghosts))
        if due:
            younger = alive + tl.cumsum(there.to(tl.int32), axis=0) - 1
            bin_of = younger.to(tl.int64) * ghost_every * _BINS // max_capacity
            one = tl.full([chunk], 1, tl.int64)
            bin_of = tl.minimum(tl.where(again, bin_of, 0), _BINS)
            tl.atomic_add(histogram + bin_of, one, mask=again, sem="relaxed")
        alive += tl.sum(there.to(tl.int32), axis=0)
        kept += tl.sum(stays.to(tl.int32), axis=0)
    for base in range(0, ghosts, chunk):
        entry = base + tl.arange(0, chunk)
        tl.store(ghost_pos + entry, -1, mask=(entry >= kept) & (entry < ghosts))
    if due:
        again_all = alive - (kept - new)
        tl.atomic_add(histogram + _BINS, (new - again_all).to(tl.int64), sem="relaxed")


@jit
def count_deeper(
    old_pos: tl.tensor,
    old_stamp: tl.tensor,
    octile: tl.tensor,
    capacity: tl.tensor,
    now: tl.tensor,
    eighth: tl.tensor,
    slots: tl.constexpr,
) -> None:
    """Move the hits at or below one edge from the octile above it to the one below it.

    Octile 0 gets all hits from plan, so that the seven edges add up to the histogram. Stamps of
    hits are negative in ``old_stamp``.
    """
    depth = (capacity * eighth + _OCTILES - 1) // _OCTILES
    held = 0
    low = 2147483647
    high = 0
    highest = 0
    for base in range(0, capacity, slots):
        _, position, stamp = load_slots(old_pos, old_stamp, capacity, base, slots)
        stamp = tl.abs(stamp)
        held += tl.sum((position >= 0).to(tl.int32), axis=0)
        low = tl.minimum(low, tl.min(tl.where(position >= 0, stamp, 2147483647), axis=0))
        high = tl.maximum(high, tl.max(tl.where(position >= 0, stamp, 0), axis=0))
        highest = tl.maximum(highest, tl.max(position, axis=0))
    if held > depth:
        edge, edge_position = cut_off(
            old_pos, old_stamp, capacity, now, held - depth, low, high, highest, slots
        )
        deeper = tl.full((), 0, tl.int32)
        for base in range(0, capacity, slots):
            _, position, stamp = load_slots(old_pos, old_stamp, capacity, base, slots)
            age = tl.abs(stamp)
            below = (age < edge) | ((age == edge) & (position <= edge_position))
            deeper += tl.sum((below & (stamp < 0)).to(tl.int32), axis=0)
        tl.atomic_add(octile + eighth, deeper.to(tl.int64), sem="relaxed")
        tl.atomic_add(octile + eighth - 1, -deeper.to(tl.int64), sem="relaxed")
