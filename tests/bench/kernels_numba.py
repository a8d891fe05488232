"""The resolver's plan for one request in numba: a yardstick for the C++ backend, nothing else.

Same state arrays, same rules, without octiles, ghosts, counters, threads or spills, so it does
slightly less than what it is compared with. Needs numba, which the package does not install.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numba
import numpy as np

from hisparsed.kernels.state import ResolverState
from tests.bench.kernels_work import BLOCK, CONTEXT, Case, Inputs, Seconds, timed


def run_steps(case: Case, inputs: Inputs) -> tuple[Seconds, float]:
    """Seconds of every step of a single request on a fresh state, and the miss ratio."""
    state = ResolverState.create(1, case.capacity, CONTEXT)
    slots = [array[0].numpy() for array in (state.slot_pos, state.slot_stamp, state.pos_slot)]
    outputs = [np.zeros(case.k, kind) for kind in (np.int64, np.int64, np.bool_)]
    swaps = [np.zeros(case.k, np.int64) for _ in range(2)]
    bitmap = np.zeros(CONTEXT // 64, np.uint64)
    addresses = (
        inputs.source[0].numpy(),
        inputs.hot[0].numpy(),
        BLOCK,
        inputs.geometry.attention_block_stride,
        inputs.geometry.host_rows,
    )
    loads = 0

    def step(topk: Any, now: int) -> None:
        nonlocal loads
        loads += _resolve_request(topk, *addresses, *slots, now, bitmap, *outputs, *swaps)

    rows = [topk[0].numpy() for topk in inputs.steps]
    seconds = [timed(partial(step, row, now)) for now, row in enumerate(rows, start=1)]
    return np.array(seconds), loads / (case.k * len(rows))


@numba.njit(cache=False)  # type: ignore[untyped-decorator]
def _resolve_request(
    topk: Any,
    source: Any,
    hot: Any,
    block_size: int,
    stride: int,
    host_rows: int,
    slot_pos: Any,
    slot_stamp: Any,
    pos_slot: Any,
    now: int,
    bitmap: Any,
    physical: Any,
    attention: Any,
    miss: Any,
    swap_host: Any,
    swap_physical: Any,
) -> int:
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
