"""Octiles and ghosts of the Triton backend: what the miss curve is made of.

Runs between classify and plan, so that it sees the stamps of the step before. Does nothing on
steps that the sample period does not divide; ghost stamps themselves follow in finalise.
"""

from __future__ import annotations

import triton.language as tl

from hisparsed.kernels.state import GHOST_BINS, OCTILES
from hisparsed.kernels.triton_language import (
    LEASED,
    REFERENCES,
    RESIDENT,
    TALLIES,
    ghost_position,
    jit,
    kernel,
)
from hisparsed.kernels.triton_select import cut_off, load_slots

_OCTILES = tl.constexpr(OCTILES)
_BINS = tl.constexpr(GHOST_BINS)


@kernel()
def sample(
    state_of_request: tl.tensor,
    request_ids: tl.tensor,
    slot_pos: tl.tensor,
    slot_stamp: tl.tensor,
    pos_slot: tl.tensor,
    capacity: tl.tensor,
    step: tl.tensor,
    octile: tl.tensor,
    ghost: tl.tensor,
    ghost_stamp: tl.tensor,
    first_row: tl.tensor,
    touched: tl.tensor,
    miss_bits: tl.tensor,
    tally: tl.tensor,
    ghosts_seen: tl.tensor,
    max_capacity: tl.tensor,
    max_positions: tl.tensor,
    miss_words: tl.tensor,
    ghosts: tl.tensor,
    sample_period: tl.tensor,
    block_size: tl.constexpr,
    ghost_every: tl.constexpr,
    slots: tl.constexpr,
    chunk: tl.constexpr,
    ghost_entries: tl.constexpr,
) -> None:
    """Eight programs per row: seven octile edges and the ghosts; the first row of a run works."""
    row = tl.program_id(0)
    if tl.load(first_row + row) != row:
        return
    state = tl.load(state_of_request + tl.load(request_ids + row)).to(tl.int64)
    if (tl.load(step + state) + 1) % sample_period != 0:
        return
    tallies = tally + state * TALLIES
    if tl.load(tallies + REFERENCES) == tl.load(tallies + RESIDENT):
        return
    rows = tl.load(capacity + state)
    leased = tl.load(tallies + LEASED).to(tl.int64) * block_size
    if (leased < rows) | (rows < 0) | (rows > max_capacity):
        return
    eighth = tl.program_id(1) + 1
    slot_pos += state * max_capacity
    slot_stamp += state * max_capacity
    touched += state * max_capacity
    if eighth < _OCTILES:
        _count_deeper(
            slot_pos,
            slot_stamp,
            touched,
            rows,
            max_positions,
            eighth,
            octile + state * _OCTILES,
            slots,
        )
    else:
        _count_ghosts(
            pos_slot + state * max_positions,
            touched,
            miss_bits + state * miss_words,
            ghost_stamp + state * ghosts,
            ghosts_seen + state * ghosts,
            ghost + state * (_BINS + 1),
            max_capacity,
            max_positions,
            ghosts,
            ghost_every,
            chunk,
            ghost_entries,
        )


@jit
def _count_deeper(
    slot_pos: tl.tensor,
    slot_stamp: tl.tensor,
    touched: tl.tensor,
    capacity: tl.tensor,
    max_positions: tl.tensor,
    eighth: tl.tensor,
    octile: tl.tensor,
    slots: tl.constexpr,
) -> None:
    """Move the hits at or below one edge from the octile above it to the one below it.

    Octile 0 gets all hits from plan, so that the seven edges add up to the histogram.
    """
    depth = (capacity * eighth + _OCTILES - 1) // _OCTILES
    held = 0
    for base in range(0, capacity, slots):
        _, position, _, _ = load_slots(slot_pos, slot_stamp, touched, capacity, base, slots)
        held += tl.sum((position >= 0).to(tl.int32), axis=0)
    if held > depth:
        edge, edge_position = cut_off(
            slot_pos, slot_stamp, touched, capacity, max_positions, held - depth, False, slots
        )
        deeper = tl.full((), 0, tl.int32)
        for base in range(0, capacity, slots):
            _, position, stamp, used = load_slots(
                slot_pos, slot_stamp, touched, capacity, base, slots
            )
            below = (stamp < edge) | ((stamp == edge) & (position <= edge_position))
            deeper += tl.sum((below & (used > 0)).to(tl.int32), axis=0)
        tl.atomic_add(octile + eighth, deeper.to(tl.int64), sem="relaxed")
        tl.atomic_add(octile + eighth - 1, -deeper.to(tl.int64), sem="relaxed")


@jit
def _count_ghosts(
    pos_slot: tl.tensor,
    touched: tl.tensor,
    miss_bits: tl.tensor,
    ghost_stamp: tl.tensor,
    seen: tl.tensor,
    histogram: tl.tensor,
    max_capacity: tl.tensor,
    max_positions: tl.tensor,
    ghosts: tl.tensor,
    ghost_every: tl.constexpr,
    chunk: tl.constexpr,
    ghost_entries: tl.constexpr,
) -> None:
    """List the samples that this step selects, then count how many were selected after each."""
    count = 0
    for base in range(0, ghosts, chunk):
        group = base + tl.arange(0, chunk)
        position = ghost_position(group, ghost_every)
        known = (group < ghosts) & (position < max_positions)
        slot = tl.load(pos_slot + position, mask=known, other=-1).to(tl.int32)
        used = tl.load(touched + slot, mask=slot >= 0, other=0)
        word = tl.load(miss_bits + position // 32, mask=known, other=0)
        selected = (used > 0) | (((word >> (position % 32)) & 1) != 0)
        place = count + tl.cumsum(selected.to(tl.int32), axis=0) - 1
        tl.store(seen + place, group, mask=selected)
        count += tl.sum(selected.to(tl.int32), axis=0)
    tl.debug_barrier()
    for base in range(0, count, ghost_entries):
        entry = base + tl.arange(0, ghost_entries)
        own_group = tl.load(seen + entry, mask=entry < count, other=0)
        own = tl.load(ghost_stamp + own_group, mask=entry < count, other=0)
        younger = tl.zeros([ghost_entries], tl.int32)
        for other_base in range(0, ghosts, chunk):
            group = other_base + tl.arange(0, chunk)
            stamp = tl.load(ghost_stamp + group, mask=group < ghosts, other=-1)
            # One sample a group, so samples of one stamp are ordered by group as by position.
            after = (stamp[None, :] > own[:, None]) | (
                (stamp[None, :] == own[:, None]) & (group[None, :] > own_group[:, None])
            )
            younger += tl.sum(after.to(tl.int32), axis=1)
        bin_of = younger.to(tl.int64) * ghost_every * _BINS // max_capacity
        bin_of = tl.where(own > 0, tl.minimum(bin_of, _BINS), _BINS)
        one = tl.full([ghost_entries], 1, tl.int64)
        tl.atomic_add(histogram + bin_of, one, mask=entry < count, sem="relaxed")
