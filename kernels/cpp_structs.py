"""The C++ backend's structs as ctypes sees them; mirrors ``cpp/interface.h`` field by field."""

from __future__ import annotations

import ctypes

_I64 = ctypes.c_int64
_POINTER = ctypes.c_void_p

DONE = 0
REQUEST_OUTSIDE = 1
STATE_OUTSIDE = 2
STATE_TWICE = 3
HOT_BLOCKS_MISSING = 4
SWAP_ROW_OUTSIDE = 5
SWAP_COUNT_OUTSIDE = 7
CAPACITY_OUTSIDE = 8


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class ResolverArrays(ctypes.Structure):
    _fields_ = [
        *_fields(_I64, "num_states max_capacity max_positions ghosts sample_period ghost_every"),
        *_fields(_POINTER, "slot_pos slot_stamp capacity step"),
        *_fields(_POINTER, "counters octile octile_misses ghost_pos ghost clock"),
    ]


class BlockTable(ctypes.Structure):
    _fields_ = [("blocks", _POINTER), ("width", _I64), ("stride", _I64)]


class ResolveStep(ctypes.Structure):
    _fields_ = [
        *_fields(_I64, "rows topk requests scratch_blocks"),
        *_fields(_I64, "block_size attention_block_stride host_rows"),
        *_fields(_I64, "resident_by_state index_bytes threads"),
        *_fields(_POINTER, "positions request_ids state_of_request scratch"),
        *_fields(BlockTable, "source resident hot"),
        *_fields(_POINTER, "physical_rows attention_indices valid_counts miss_mask"),
        *_fields(_POINTER, "swap_host swap_physical swap_counts"),
        ("error_figures", _I64 * 4),
    ]


class GatherCall(ctypes.Structure):
    _fields_ = [
        *_fields(_POINTER, "host slab"),
        *_fields(_I64, "host_rows slab_rows"),
        *_fields(_I64, "block_size row_bytes host_block_bytes slab_block_bytes layers"),
        *_fields(_POINTER, "host_offsets slab_offsets"),
        *_fields(_I64, "rows topk threads"),
        *_fields(_POINTER, "swap_host swap_physical swap_counts"),
        ("error_figures", _I64 * 2),
    ]
