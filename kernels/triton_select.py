"""The cut-off of a selection: the n-th smallest (stamp, position) among the slots of one run.

A radix search, eight bits of the stamp and then of the position at a time, skipping the digits
that all stamps share. Keys are unique, so a cut-off selects exactly n slots.
"""

from __future__ import annotations

import triton.language as tl

from hisparsed.kernels.triton_language import jit


@jit
def load_slots(
    slot_pos: tl.tensor,
    slot_stamp: tl.tensor,
    touched: tl.tensor,
    capacity: tl.tensor,
    base: tl.tensor,
    slots: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Slot, position, stamp and whether this step selects it; position -2 beyond the capacity."""
    slot = base + tl.arange(0, slots)
    inside = slot < capacity
    position = tl.load(slot_pos + slot, mask=inside, other=-2)
    stamp = tl.load(slot_stamp + slot, mask=inside, other=0)
    used = tl.load(touched + slot, mask=inside, other=0)
    return slot, position, stamp, used


@jit
def _nth_value(
    slot_pos: tl.tensor,
    slot_stamp: tl.tensor,
    touched: tl.tensor,
    capacity: tl.tensor,
    wanted: tl.tensor,
    low: tl.tensor,
    span: tl.tensor,
    of_stamp: tl.tensor,
    by_position: tl.constexpr,
    stale_only: tl.constexpr,
    slots: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Value of rank ``wanted`` (from 1) less ``low``, and its rank among its equals."""
    digits = 1
    digits += (span > 0xFF).to(tl.int32)
    digits += (span > 0xFFFF).to(tl.int32)
    digits += (span > 0xFFFFFF).to(tl.int32)
    prefix = 0
    bins = tl.arange(0, 256)
    for turn in range(digits):
        shift = 8 * (digits - 1 - turn)
        counts = tl.zeros([256], tl.int32)
        for base in range(0, capacity, slots):
            _, position, stamp, used = load_slots(
                slot_pos, slot_stamp, touched, capacity, base, slots
            )
            candidate = position >= 0
            if stale_only:
                candidate = candidate & (used == 0)
            if by_position:
                candidate = candidate & (stamp == of_stamp)
                value = position - low
            else:
                value = stamp - low
            candidate = candidate & (((value >> shift) >> 8) == prefix)
            counts += tl.histogram((value >> shift) & 0xFF, 256, mask=candidate)
        digit = tl.sum((tl.cumsum(counts, axis=0) < wanted).to(tl.int32), axis=0)
        wanted -= tl.sum(tl.where(bins < digit, counts, 0), axis=0)
        prefix = prefix * 256 + digit
    return prefix, wanted


@jit
def cut_off(
    slot_pos: tl.tensor,
    slot_stamp: tl.tensor,
    touched: tl.tensor,
    capacity: tl.tensor,
    max_positions: tl.tensor,
    wanted: tl.tensor,
    stale_only: tl.constexpr,
    slots: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Stamp and position of the ``wanted``-th smallest held slot; there must be as many.

    ``stale_only`` leaves out what this step selects.
    """
    low = 2147483647
    high = 0
    for base in range(0, capacity, slots):
        _, position, stamp, used = load_slots(slot_pos, slot_stamp, touched, capacity, base, slots)
        candidate = position >= 0
        if stale_only:
            candidate = candidate & (used == 0)
        low = tl.minimum(low, tl.min(tl.where(candidate, stamp, 2147483647), axis=0))
        high = tl.maximum(high, tl.max(tl.where(candidate, stamp, 0), axis=0))
    stamp, rank = _nth_value(
        slot_pos,
        slot_stamp,
        touched,
        capacity,
        wanted,
        low,
        high - low,
        0,
        False,
        stale_only,
        slots,
    )
    stamp += low
    position, _ = _nth_value(
        slot_pos,
        slot_stamp,
        touched,
        capacity,
        rank,
        0,
        max_positions,
        stamp,
        True,
        stale_only,
        slots,
    )
    return stamp, position
