"""The resolver's plan for one request in numba: a yardstick for the C++ backend, nothing else.

Same state arrays, same rules, without octiles, ghosts, counters, threads or spills, so it does
slightly less than what it is compared with. Needs numba, which the package does not install.
"""

from __future__ import annotations

import numba
import numpy as np


@numba.njit(cache=False)
def resolve_request(
    topk, source, hot, block_size, stride, host_rows, slot_pos, slot_stamp, pos_slot, now,
    bitmap, physical, attention, miss, swap_host, swap_physical,
):  # fmt: skip
    """One row of top-k positions; returns the number of loads. All arrays are numpy views."""
    hits = 0
    missing = 0
    for cell in range(topk.size):
        position = topk[cell]
        physical[cell] = -1
        attention[cell] = -1
        miss[cell] = False
        if position < 0:
            continue
        page = position // block_size
        if source[page] <= 0 or source[page] * block_size >= host_rows:
            continue
        slot = pos_slot[position]
        if slot < 0:
            bitmap[position >> 6] |= np.uint64(1) << np.uint64(position & 63)
            continue
        block = hot[slot // block_size]
        physical[cell] = block * block_size + slot % block_size
        attention[cell] = block * stride + slot % block_size
        if slot_stamp[slot] != now:
            slot_stamp[slot] = now
            hits += 1
    misses = np.empty(topk.size, np.int32)
    for word in range(bitmap.size):
        bits = bitmap[word]
        if bits == 0:
            continue
        for bit in range(64):
            if bits >> np.uint64(bit) & np.uint64(1):
                misses[missing] = word * 64 + bit
                missing += 1
        bitmap[word] = 0
    if missing == 0:
        return 0
    keys = np.empty(slot_pos.size, np.int64)
    for slot in range(slot_pos.size):
        if slot_pos[slot] < 0:
            keys[slot] = slot - slot_pos.size
        elif slot_stamp[slot] == now:
            keys[slot] = np.int64(2) ** 62
        else:
            keys[slot] = (np.int64(slot_stamp[slot]) << 32) | slot_pos[slot]
    cut = np.partition(keys, missing - 1)[missing - 1]
    taken = 0
    for slot in range(slot_pos.size):
        if keys[slot] > cut or taken == missing:
            continue
        position = misses[taken]
        if slot_pos[slot] >= 0:
            pos_slot[slot_pos[slot]] = -1
        slot_pos[slot] = position
        slot_stamp[slot] = now
        pos_slot[position] = slot
        page = position // block_size
        swap_host[taken] = source[page] * block_size + position % block_size
        swap_physical[taken] = hot[slot // block_size] * block_size + slot % block_size
        taken += 1
    for cell in range(topk.size):
        if physical[cell] < 0 and topk[cell] >= 0:
            slot = pos_slot[topk[cell]]
            if slot >= 0:
                block = hot[slot // block_size]
                physical[cell] = block * block_size + slot % block_size
                attention[cell] = block * stride + slot % block_size
                miss[cell] = True
    return taken
