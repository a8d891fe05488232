"""Free chunk slots of lent host blocks, kept by block. Pure bookkeeping, every step O(1).

Blocks that are partly filled are filled up first, so that whole blocks stay free and a
recall finds them. Knows nothing of chunks' contents or of who lent the blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class FreeSlots:
    """A free list by block; ``len`` is the number of free slots."""

    def __init__(self) -> None:
        self._by_block: OrderedDict[int, list[int]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, block: int, slots: Iterable[int]) -> None:
        """A newly lent block: its slots are taken, in the order given, after all others."""
        reversed_slots = list(slots)[::-1]
        if not reversed_slots:
            return
        self._by_block[block] = reversed_slots
        self._by_block.move_to_end(block, last=False)
        self._count += len(reversed_slots)

    def take(self) -> int:
        """Raises ``IndexError`` when no slot is free."""
        if not self._by_block:
            raise IndexError("no free slot")
        block = next(reversed(self._by_block))
        slots = self._by_block[block]
        slot = slots.pop()
        if not slots:
            del self._by_block[block]
        self._count -= 1
        return slot

    def put(self, block: int, slot: int) -> None:
        """A slot of ``block`` is free again, and among the next to be taken."""
        self._by_block.setdefault(block, []).append(slot)
        self._count += 1

    def drop(self, block: int) -> None:
        """Forget the free slots of a block that is being recalled."""
        self._count -= len(self._by_block.pop(block, ()))

    def of_block(self, block: int) -> int:
        """How many slots of ``block`` are free."""
        return len(self._by_block.get(block, ()))

    def clear(self) -> None:
        self._by_block.clear()
        self._count = 0
