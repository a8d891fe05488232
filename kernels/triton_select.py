"""The cut-off of a selection: the n-th smallest (stamp, position) among the slots of one run.

A radix search, eight bits of the stamp and then of the position at a time, skipping the digits
that all stamps share and those above the highest position. Keys are unique, so a cut-off selects
exactly n slots.
"""

from __future__ import annotations

import triton.language as tl

from hisparsed.kernels.triton_language import jit


@jit
def load_slots(
    slot_pos: tl.tensor,
    slot_stamp: tl.tensor,
    capacity: tl.tensor,
    base: tl.tensor,
    slots: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Slot, position and stamp; position -2 beyond the capacity."""
    slot = base + tl.arange(0, slots)
    inside = slot < capacity
    position = tl.load(slot_pos + slot, mask=inside, other=-2)
    stamp = tl.load(slot_stamp + slot, mask=inside, other=0)
    return slot, position, stamp


@jit
def _nth_value(
    slot_pos: tl.tensor,
    slot_stamp: tl.tensor,
    capacity: tl.tensor,
    now: tl.tensor,
    wanted: tl.tensor,
    low: tl.tensor,
    span: tl.tensor,
    of_stamp: tl.tensor,
    by_position: tl.constexpr,
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
            _, position, stamp = load_slots(slot_pos, slot_stamp, capacity, base, slots)
            stamp = tl.abs(stamp)
            candidate = (position >= 0) & (stamp < now)
            if by_position:
                candidate = candidate & (stamp == of_stamp)
                value = position
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
    capacity: tl.tensor,
    now: tl.tensor,
    wanted: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    highest: tl.tensor,
    slots: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Stamp and position of the ``wanted``-th smallest held slot that is not stamped ``now``.

    There must be as many. Their stamps lie between ``low`` and ``high``, their positions are at
    most ``highest``. A stamp may carry a sign, which does not count.
    """
    stamp, rank = _nth_value(
        slot_pos, slot_stamp, capacity, now, wanted, low, high - low, 0, False, slots
    )
    stamp += low
    position, _ = _nth_value(
        slot_pos, slot_stamp, capacity, now, rank, 0, highest, stamp, True, slots
    )
    return stamp, position
