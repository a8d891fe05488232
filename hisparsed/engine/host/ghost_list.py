"""Ghost lists: the blocks that a pool evicted, and the tokens that more capacity would have served.
Pure data.

Only blocks whose name hashes below a threshold are followed, so memory is fixed and small
(SHARDS: Waldspurger, Park, Garthwaite and Ahmad, "Efficient MRC Construction with SHARDS",
FAST 2015). Knows no vLLM: the callers report evictions and look-ups.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from zlib import crc32


class GhostList:
    """Evicted blocks of one LRU pool, the latest on top.

    A block at depth ``n`` would still be in the pool if the pool had ``n`` more entries, as long as
    blocks that return are ``restored``. ``sample_rate`` of all hashes are followed, at most
    ``max_entries`` of them; the oldest fall off. ``entries_per_block`` of the pool's entries fit
    into one host block.
    """

    def __init__(
        self, max_entries: int, sample_rate: float, entries_per_block: float = 1.0
    ) -> None:
        if max_entries < 1 or not 0 < sample_rate <= 1 or entries_per_block <= 0:
            raise ValueError(
                f"max_entries {max_entries}, sample_rate {sample_rate}, entries_per_block "
                f"{entries_per_block}: the first must be at least 1, the second above 0 and at "
                "most 1, the third above 0"
            )
        self.sample_rate = sample_rate
        self._max_entries = max_entries
        self._entries_per_block = entries_per_block
        self._threshold = round(sample_rate * 2**32)
        self._slots: dict[bytes, int] = {}
        # Ranks among the slots in use, as a Fenwick tree: both updates and ranks are O(log n).
        self._size = 2 * max_entries
        self._tree = [0] * (self._size + 1)
        self._next_slot = 0

    def __len__(self) -> int:
        return len(self._slots)

    def samples(self, block_hash: bytes) -> bool:
        """Whether this hash is followed; the same answer in every list of this rate."""
        # A checksum, because names of blocks in a simulation are not evenly distributed.
        return crc32(block_hash) < self._threshold

    def sampled(self, hashes: Sequence[bytes]) -> Sequence[bytes]:
        """Those of ``hashes`` that are followed, in their order."""
        threshold = self._threshold
        if self.sample_rate == 1:
            return hashes
        return [block_hash for block_hash in hashes if crc32(block_hash) < threshold]

    def evicted(self, block_hash: bytes) -> None:
        """The pool has just evicted the block."""
        if not self.samples(block_hash):
            return
        self.restored(block_hash)
        if self._next_slot == self._size:
            self._compact()
        self._slots[block_hash] = self._next_slot
        self._add(self._next_slot, 1)
        self._next_slot += 1
        if len(self._slots) > self._max_entries:
            self.restored(next(iter(self._slots)))

    def restored(self, block_hash: bytes) -> None:
        """The block is in the pool again, or will never be asked for."""
        slot = self._slots.pop(block_hash, None)
        if slot is not None:
            self._add(slot, -1)

    def extra_blocks(self, block_hash: bytes) -> int | None:
        """Additional host blocks with which the pool would still hold the block.

        ``None`` where the block is not followed, or was never evicted or too long ago.
        """
        slot = self._slots.get(block_hash)
        if slot is None:
            return None
        depth = len(self._slots) - self._before(slot)
        return math.ceil(depth / self.sample_rate / self._entries_per_block)

    def clear(self) -> None:
        """The pool was emptied."""
        self._slots.clear()
        self._tree = [0] * (self._size + 1)
        self._next_slot = 0

    def _compact(self) -> None:
        hashes = list(self._slots)
        self.clear()
        for block_hash in hashes:
            self._slots[block_hash] = self._next_slot
            self._add(self._next_slot, 1)
            self._next_slot += 1

    def _add(self, slot: int, change: int) -> None:
        index = slot + 1
        while index <= self._size:
            self._tree[index] += change
            index += index & -index

    def _before(self, slot: int) -> int:
        """Entries in slots below ``slot``."""
        count, index = 0, slot
        while index:
            count += self._tree[index]
            index -= index & -index
        return count


@dataclass(frozen=True, slots=True)
class GhostTokens:
    """Tokens so far that the pool would have served with ``extra_blocks`` more."""

    extra_blocks: int
    tokens: int


Holds = Callable[[bytes], bool]
"""Whether a pool holds the block of a hash; must not change how recent it is."""


class PrefixGhosts:
    """Tokens that either pool would have served with more blocks, where the other held its part.

    A prefix is served up to its first block that a pool lacks, so the need of a block is the
    largest need of any block up to it. A block that the other pool lacks ends the prefix, since
    blocks only move between the two. ``edges`` are the capacities, in additional host blocks, at
    which tokens are counted; ``offload_edges`` those of the offload pool where they differ.
    """

    def __init__(
        self,
        hisparse: GhostList,
        offload: GhostList,
        block_tokens: int,
        edges: Sequence[int],
        offload_edges: Sequence[int] | None = None,
    ) -> None:
        if hisparse.sample_rate != offload.sample_rate:
            raise ValueError(
                f"sample rates {hisparse.sample_rate} and {offload.sample_rate} differ; both "
                "lists must follow the same blocks"
            )
        self.hisparse = hisparse
        self.offload = offload
        tokens_a_sample = block_tokens / hisparse.sample_rate
        self._of_hisparse = _Pool(hisparse, edges, tokens_a_sample)
        self._of_offload = _Pool(offload, offload_edges or edges, tokens_a_sample)

    def looked_up(
        self, hashes: Sequence[bytes], hisparse_holds: Holds, offload_holds: Holds
    ) -> None:
        """A call asked for the prefix of these blocks; before anything of it is restored."""
        hisparse, offload = self._of_hisparse, self._of_offload
        hisparse_need: int | None = 0
        offload_need: int | None = 0
        for block_hash in self.hisparse.sampled(hashes):
            in_hisparse, in_offload = hisparse_holds(block_hash), offload_holds(block_hash)
            if hisparse_need is not None:
                hisparse_need = hisparse.counted(block_hash, hisparse_need, in_hisparse, in_offload)
            if offload_need is not None:
                offload_need = offload.counted(block_hash, offload_need, in_offload, in_hisparse)
            if hisparse_need is None and offload_need is None:
                return

    def hisparse_points(self) -> tuple[GhostTokens, ...]:
        """Rising in ``extra_blocks`` and in tokens."""
        return self._of_hisparse.points()

    def offload_points(self) -> tuple[GhostTokens, ...]:
        """Rising in ``extra_blocks`` and in tokens."""
        return self._of_offload.points()


class _Pool:
    """One pool's ghosts, and tokens counted by the edge from which on they are served."""

    def __init__(self, ghosts: GhostList, edges: Sequence[int], tokens_a_sample: float) -> None:
        if not edges or list(edges) != sorted(set(edges)) or edges[0] < 1:
            raise ValueError(f"edges {list(edges)} must be one or more rising numbers from 1 on")
        self._ghosts = ghosts
        self._edges = tuple(edges)
        self._tokens_a_sample = tokens_a_sample
        self._samples = [0] * len(self._edges)

    def counted(self, block_hash: bytes, need: int, held: bool, other_holds: bool) -> int | None:
        """Blocks that a prefix up to this block needs, when it needed ``need`` so far.

        ``None`` where no number of blocks serves it, or none that is counted.
        """
        if not other_holds:
            return None
        if not held:
            extra = self._ghosts.extra_blocks(block_hash)
            if extra is None:
                return None
            need = max(need, extra)
        if need > self._edges[-1]:
            return None
        if need:
            self._samples[bisect_left(self._edges, need)] += 1
        return need

    def points(self) -> tuple[GhostTokens, ...]:
        totals = accumulate(self._samples)
        return tuple(
            GhostTokens(edge, int(total * self._tokens_a_sample))
            for edge, total in zip(self._edges, totals, strict=True)
        )
