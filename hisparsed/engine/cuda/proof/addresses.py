"""Row numbers past 2**31, with addresses instead of memory.

A host pool of that many rows is reserved and not backed: only the pages of the rows that are read
are touched, and on a GPU pinned. The slab's rows lie past 2**31 bytes.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from typing import Any

import torch

from hisparsed.kernels.api import (
    Geometry,
    Resolution,
    ResolverState,
    RowLayout,
    gather,
    reset,
    resolve,
)

_PAGE = mmap.PAGESIZE
_NO_RESERVE = 0x4000
"""MAP_NORESERVE on Linux, which Python's mmap names since 3.13."""
BLOCK = 64
ROW_BYTES = 16
PAST = 2**31
"""First row number that int32 does not hold."""
_HOST_BLOCKS = PAST // BLOCK + 2
_SLAB_BLOCK_BYTES = 2**26
_SLAB_BLOCKS = PAST // _SLAB_BLOCK_BYTES + 2


def first_difference_past_int32(device: torch.device) -> str | None:
    """Which row is wrong, in words. Raises ``OSError`` or ``RuntimeError`` where such memory
    cannot be had."""
    with _reserved(_HOST_BLOCKS * BLOCK * ROW_BYTES, device) as host:
        return _first_difference(host, device)


def _first_difference(host: torch.Tensor, device: torch.device) -> str | None:
    block = _HOST_BLOCKS - 1
    positions = [3, 17, BLOCK - 1]
    layout = RowLayout(BLOCK, ROW_BYTES, BLOCK * ROW_BYTES, _SLAB_BLOCK_BYTES, (0,), (0,))
    hot = _SLAB_BLOCKS - 1
    slab = torch.empty(_SLAB_BLOCKS * _SLAB_BLOCK_BYTES, dtype=torch.uint8, device=device)
    target = slab[hot * _SLAB_BLOCK_BYTES :][: BLOCK * ROW_BYTES].view(BLOCK, ROW_BYTES)
    target.zero_()
    source = host[block * BLOCK * ROW_BYTES :][: BLOCK * ROW_BYTES].view(BLOCK, ROW_BYTES)
    source.copy_(torch.arange(BLOCK * ROW_BYTES).view(BLOCK, ROW_BYTES) % 251 + 1)

    def ints(*values: list[int] | int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    state = ResolverState.create(1, BLOCK, BLOCK, device=device)
    reset(state, 0, capacity=BLOCK)
    out: Resolution = resolve(
        state,
        Geometry(BLOCK, BLOCK, slab_blocks=_SLAB_BLOCKS, host_blocks=_HOST_BLOCKS),
        ints(positions),
        ints(0),
        ints(0),
        ints([block]),
        ints([0]),
        ints([hot]),
    )
    rows = [block * BLOCK + position for position in positions]
    count = int(out.swap_counts[0])
    found = out.swap_host[0, :count].tolist()
    if found != rows:
        return f"host rows past 2**31: {found} would be read for {rows}"
    gather(host, slab, layout, out.swap_host, out.swap_physical, out.swap_counts, pinned=True)
    for position, physical in zip(positions, out.physical_rows[0].tolist(), strict=True):
        if not torch.equal(target[physical % BLOCK].cpu(), source[position]):
            return f"host row {block * BLOCK + position}, past 2**31, was not copied"
    return None


@contextlib.contextmanager
def _reserved(size: int, device: torch.device) -> Iterator[torch.Tensor]:
    """uint8 [size] of addresses; the first page and the last ones can be used."""
    size = -(-size // _PAGE) * _PAGE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    memory = torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.uint8)
    used = (memory[:_PAGE], memory[size - 2 * _PAGE :])
    for part in used:
        part.zero_()
    pinned: list[torch.Tensor] = []
    try:
        for part in used if device.type == "cuda" else ():
            _require(cuda_runtime().cudaHostRegister(part.data_ptr(), part.nbytes, 0))
            pinned.append(part)
        yield memory
    finally:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        for part in pinned:
            cuda_runtime().cudaHostUnregister(part.data_ptr())


def cuda_runtime() -> Any:
    """The calls that pin memory."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _require(code: object) -> None:
    if int(code):  # type: ignore[call-overload]
        raise RuntimeError(f"pinning a page of reserved addresses failed with CUDA error {code}")
