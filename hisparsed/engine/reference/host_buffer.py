"""The reference node's host memory: one private mapping, whole pages of which can be given
back to the operating system while it is used.

Nothing is pinned here, so this works while requests run. Released pages read as zeros until
they are written again.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable

import torch


class HostBuffer:
    """``bytes`` is an int8 tensor of ``size`` over the mapping, filled with ``fill``."""

    def __init__(self, size: int, fill: int) -> None:
        # Private: of a shared mapping, the pages would stay with the kernel.
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes = torch.frombuffer(self._map, dtype=torch.int8)
        self.bytes.fill_(fill)

    def release(self, spans: Iterable[tuple[int, int]]) -> int:
        """Give back the whole pages inside ``(start, end)`` byte spans; returns their bytes."""
        released = 0
        for start, end in spans:
            first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            length = end // mmap.PAGESIZE * mmap.PAGESIZE - first
            if length > 0:
                self._map.madvise(mmap.MADV_DONTNEED, first, length)
                released += length
        return released


def runs(ids: Iterable[int]) -> list[tuple[int, int]]:
    """Ascending distinct ids as ``(first, beyond last)`` of each run of neighbours."""
    found: list[tuple[int, int]] = []
    for one in ids:
        if found and found[-1][1] == one:
            found[-1] = (found[-1][0], one + 1)
        else:
            found.append((one, one + 1))
    return found
