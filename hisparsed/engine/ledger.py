"""The host ledger: which host blocks HiSparse uses and which are lent to the offload pool.

Memory is pinned once, as HiSparse's host pool; a move is bookkeeping. Lending takes idle
blocks from HiSparse (free ones, then least recently used prefixes), never one in use; what
cannot be taken yet is *pending*. Recalling evicts idle chunks, coldest blocks first; blocks
with transfers in flight are *draining*. Runs on the engine thread, between steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hisparsed.engine.chunks import ChunkLayout


class HostBlock(Protocol):
    block_id: int


class HostPool(Protocol):
    """The part of vLLM's ``BlockPool`` that the ledger uses."""

    num_gpu_blocks: int
    blocks: list[HostBlock]

    def get_num_free_blocks(self) -> int: ...
    def get_new_blocks(self, num_blocks: int) -> Sequence[HostBlock]: ...
    def free_blocks(self, ordered_blocks: Sequence[HostBlock]) -> None: ...


class Borrower(Protocol):
    """The offload pool as the ledger sees it."""

    @property
    def lent_blocks(self) -> int: ...
    @property
    def draining_blocks(self) -> int: ...
    def lend(self, block_ids: Sequence[int]) -> None: ...
    def recall(self, count: int) -> list[int]: ...
    def take_drained(self) -> list[int]: ...


@dataclass(frozen=True)
class LedgerCounts:
    """Host blocks by tenant and state at one moment; the null block is nobody's."""

    budget: int
    hisparse_capacity: int
    hisparse_in_use: int
    hisparse_idle: int
    offload_target: int
    lent: int
    pending: int
    draining: int


class HostLedger:
    """Moves blocks between the two tenants towards one target.

    ``floor_blocks`` is absolute: HiSparse keeps at least one request at ``max_model_len``
    plus a copy-on-write tail, or vLLM would wait for ever on an idle node.
    """

    def __init__(
        self, pool: HostPool, borrower: Borrower, layout: ChunkLayout, floor_blocks: int
    ) -> None:
        self._pool = pool
        self._borrower = borrower
        self.layout = layout
        self.budget = pool.num_gpu_blocks - 1
        if floor_blocks > self.budget:
            raise ValueError(
                f"the host budget of {self.budget} blocks is below the {floor_blocks} that one "
                "request at max_model_len needs; raise host_budget or lower max_model_len"
            )
        self.floor_blocks = floor_blocks
        self.offload_target = 0

    def set_offload_target(self, blocks: int) -> int:
        """Ask for ``blocks`` lent; returns the target in force, bounded by the floor."""
        if blocks < 0:
            raise ValueError(f"offload target must not be negative, got {blocks}")
        self.offload_target = min(blocks, self.budget - self.floor_blocks)
        return self.offload_target

    def advance(self, head_need_blocks: int) -> int:
        """Take one step towards the target; returns blocks moved (lent positive).

        ``head_need_blocks``: host blocks that the head of the waiting queue needs; that many
        stay free, and blocks already lent beyond the target come back first.
        """
        returned = self._borrower.take_drained()
        lent = self._borrower.lent_blocks
        staying = lent - self._borrower.draining_blocks
        if staying > self.offload_target:
            returned += self._borrower.recall(staying - self.offload_target)
        if returned:
            self._pool.free_blocks([self._pool.blocks[block] for block in returned])
            return -len(returned)
        want = min(
            self.offload_target - staying,
            self._pool.get_num_free_blocks() - head_need_blocks,
            self.budget - self.floor_blocks - lent,
        )
        if want <= 0:
            return 0
        self._borrower.lend([block.block_id for block in self._pool.get_new_blocks(want)])
        return want

    def settled(self) -> bool:
        """Whether the next ``advance`` has nothing to do."""
        return (
            self._borrower.lent_blocks == self.offload_target
            and self._borrower.draining_blocks == 0
        )

    def counts(self) -> LedgerCounts:
        """Figures of this moment; constant time."""
        lent = self._borrower.lent_blocks
        draining = self._borrower.draining_blocks
        idle = self._pool.get_num_free_blocks()
        capacity = self.budget - lent
        return LedgerCounts(
            budget=self.budget,
            hisparse_capacity=capacity,
            hisparse_in_use=capacity - idle,
            hisparse_idle=idle,
            offload_target=self.offload_target,
            lent=lent,
            pending=max(0, self.offload_target - (lent - draining)),
            draining=draining,
        )
