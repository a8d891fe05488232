"""The host ledger: which host blocks HiSparse uses, which are lent, which are in reserve.

Memory is pinned once, as HiSparse's host pool; a move is bookkeeping. Every block has one tenant:
hisparse, offload (lent) or reserve (no pool). Only idle blocks are taken from HiSparse (free ones,
then least recently used prefixes); those that cannot be taken yet are *pending*. A block that
returns from the offload pool with transfers in flight is *draining* until they end. Runs on the
engine thread, between scheduling passes only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from hisparsed.engine.host.chunks import ChunkLayout


class HostPool(Protocol):
    """The part of ``CountingHostPool`` that the ledger uses."""

    num_gpu_blocks: int

    def get_num_free_blocks(self) -> int: ...
    def take_idle(self, count: int) -> list[int]: ...
    def give_back(self, block_ids: Sequence[int]) -> None: ...


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
    """Host blocks by tenant and state at one moment; the null block has no tenant.

    ``pending`` are assigned to the offload pool or the reserve and still with HiSparse.
    """

    budget: int
    hisparse_capacity: int
    hisparse_in_use: int
    hisparse_idle: int
    offload_target: int
    lent: int
    pending: int
    draining: int
    reserve_target: int
    reserve: int


class HostLedger:
    """Moves blocks between the tenants towards two targets; HiSparse has the rest.

    ``floor_blocks`` is absolute: HiSparse keeps at least one request at ``max_model_len``
    plus a copy-on-write tail, or vLLM would wait forever on an idle node.
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
        self.reserve_target = 0
        self.frozen = False
        """Set on a violation: no block changes its tenant any more."""
        self._reserve: dict[int, None] = {}
        self._in_pass = False

    # --- targets ----------------------------------------------------------------------

    def set_offload_target(self, blocks: int) -> int:
        """Ask for ``blocks`` lent; returns the target in force, bounded by floor and reserve."""
        if blocks < 0:
            raise ValueError(f"offload target must not be negative, got {blocks}")
        self.offload_target = min(blocks, self.budget - self.floor_blocks - self.reserve_target)
        return self.offload_target

    def set_reserve_target(self, blocks: int) -> int:
        """Ask for ``blocks`` for the reserve; bounded by the floor.

        A reserve that leaves too little for the offload target lowers the target.
        """
        if blocks < 0:
            raise ValueError(f"reserve target must not be negative, got {blocks}")
        self.reserve_target = min(blocks, self.budget - self.floor_blocks)
        self.set_offload_target(self.offload_target)
        return self.reserve_target

    @property
    def reserve_blocks(self) -> Sequence[int]:
        """Ids of the blocks in reserve."""
        return list(self._reserve)

    @property
    def held_blocks(self) -> int:
        """Blocks of other tenants than HiSparse, draining ones included."""
        return self._borrower.lent_blocks + len(self._reserve)

    def is_reserved(self, block: int) -> bool:
        return block in self._reserve

    # --- moves ------------------------------------------------------------------------

    @contextmanager
    def scheduling(self) -> Iterator[None]:
        """No block moves within a scheduling pass: vLLM looks chunks up, then loads them."""
        self._in_pass = True
        try:
            yield
        finally:
            self._in_pass = False

    def advance(self, head_need_blocks: int, most: int | None = None) -> int:
        """Take one step towards the targets; returns blocks taken from HiSparse, net.

        Blocks beyond a target return first. ``head_need_blocks``: host blocks that the head of the
        waiting queue needs; that many stay free. ``most`` bounds the blocks that are taken or
        recalled in this step.
        """
        if self.frozen or self._in_pass:
            return 0
        limit = self.budget if most is None else most
        staying = self._borrower.lent_blocks - self._borrower.draining_blocks
        returned = self._borrower.take_drained()
        surplus = min(limit, staying - self.offload_target)
        if surplus > 0:
            returned += self._borrower.recall(surplus)
            staying -= surplus
        returned += self._leave_reserve(len(self._reserve) - self.reserve_target)
        if returned:
            self._pool.give_back(returned)
        spare = min(
            limit,
            self._pool.get_num_free_blocks() - head_need_blocks,
            self.budget - self.floor_blocks - self.held_blocks,
        )
        to_reserve = max(0, min(self.reserve_target - len(self._reserve), spare))
        if to_reserve:
            self._reserve.update(dict.fromkeys(self._pool.take_idle(to_reserve)))
        to_offload = max(0, min(self.offload_target - staying, spare - to_reserve))
        if to_offload:
            self._borrower.lend(self._pool.take_idle(to_offload))
        return to_reserve + to_offload - len(returned)

    def give_back(self, blocks: int) -> int:
        """Return up to ``blocks`` at once: a call waits for them and nothing runs.

        Lent blocks return first, then the reserve. The targets fall with them, or the next step
        would take the blocks before the call has used them. Returns the number of returned blocks.
        """
        if self.frozen or self._in_pass or blocks <= 0:
            return 0
        returned = self._borrower.take_drained()
        if len(returned) < blocks:
            returned += self._borrower.recall(blocks - len(returned))
        returned += self._leave_reserve(blocks - len(returned))
        if returned:
            self._pool.give_back(returned)
        staying = self._borrower.lent_blocks - self._borrower.draining_blocks
        self.offload_target = min(self.offload_target, staying)
        self.reserve_target = min(self.reserve_target, len(self._reserve))
        return len(returned)

    def _leave_reserve(self, count: int) -> list[int]:
        leaving = list(self._reserve)[: max(0, count)]
        for block in leaving:
            del self._reserve[block]
        return leaving

    # --- state -----------------------------------------------------------

    def settled(self) -> bool:
        """Whether the next ``advance`` has nothing to do."""
        return (
            self._borrower.lent_blocks == self.offload_target
            and self._borrower.draining_blocks == 0
            and len(self._reserve) == self.reserve_target
        )

    def counts(self) -> LedgerCounts:
        """Figures of this moment; constant time."""
        lent = self._borrower.lent_blocks
        draining = self._borrower.draining_blocks
        reserve = len(self._reserve)
        idle = self._pool.get_num_free_blocks()
        capacity = self.budget - lent - reserve
        return LedgerCounts(
            budget=self.budget,
            hisparse_capacity=capacity,
            hisparse_in_use=capacity - idle,
            hisparse_idle=idle,
            offload_target=self.offload_target,
            lent=lent,
            pending=max(0, self.offload_target - (lent - draining))
            + max(0, self.reserve_target - reserve),
            draining=draining,
            reserve_target=self.reserve_target,
            reserve=reserve,
        )
