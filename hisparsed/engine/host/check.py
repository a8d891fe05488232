"""Checks the host ledger while the engine serves, and stops all moves on a violation.

``LedgerReader`` reads the ledger's state from vLLM's live objects: counters cost a few
microseconds, blocks about one each, and their owners need a walk over all requests. Every report
checks the counters and a bounded slice of blocks, so the whole pool is checked over time at a
negligible cost. A violation freezes the ledger: requests are still served, but no block changes its
tenant. Only ``clear`` ends the freeze, and only if a full check finds nothing. ``invariants`` has
the rules. Engine thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from hisparsed.engine.compat.adapters import detached_blocks
from hisparsed.engine.host.invariants import (
    BlockFacts,
    CountFacts,
    LedgerSnapshot,
    violations,
)
from hisparsed.engine.host.ledger import HostLedger
from hisparsed.engine.host.offload import LentOffloadingManager
from hisparsed.engine.host.pool import CountingHostPool
from hisparsed.policy.signals import LedgerViolation


class LedgerReader:
    """``coordinator`` is vLLM's HiSparse coordinator; without it owners are not counted.

    ``freed_later`` returns blocks of any pool that finished calls hold until a step has ended.
    """

    def __init__(
        self,
        ledger: HostLedger,
        pool: CountingHostPool,
        offload: LentOffloadingManager,
        coordinator: Any = None,
        freed_later: Callable[[], Iterable[Any]] = tuple,
    ) -> None:
        self._ledger = ledger
        self._pool = pool
        self._offload = offload
        self._coordinator = coordinator
        self._freed_later = freed_later

    def counts(self) -> CountFacts:
        offload = self._offload
        return CountFacts(
            **vars(self._ledger.counts()),
            floor=self._ledger.floor_blocks,
            referenced=self._pool.referenced_blocks,
            held=self._pool.held_blocks,
            drained=offload.drained_blocks,
            idle_cached=self._pool.idle_cached_blocks,
            chunks_per_block=offload.layout.chunks_per_block,
            free_slots=offload.free_slots,
            stored=offload.stored_chunks,
            evictable=offload.evictable_chunks,
            settling=offload.settling_slots,
            write_pending=offload.write_pending_chunks,
            draining_busy_slots=offload.draining_busy_slots,
        )

    def of_counts(self) -> LedgerSnapshot:
        return LedgerSnapshot(self.counts())

    def of_blocks(self, first: int, cost: int) -> tuple[LedgerSnapshot, int]:
        """A few blocks from ``first`` on, in which a lent block counts as its slots, and the next
        block to check. Blocks of HiSparse that are obviously sound are omitted."""
        facts: list[BlockFacts] = []
        is_lent, is_reserved = self._offload.holds, self._ledger.is_reserved
        weight = self._offload.layout.chunks_per_block
        first = max(1, first)
        following = first
        for block in self._pool.blocks[first : first + cost]:
            following += 1
            if is_lent(block.block_id) or is_reserved(block.block_id):
                cost -= weight
            elif (block.ref_cnt == 0) == (block.next_free_block is not None):
                cost -= 1
                continue
            facts.append(self._block(following - 1, None))
            if cost <= 0:
                break
        done = following >= self._pool.num_gpu_blocks
        return LedgerSnapshot(self.counts(), facts), 0 if done else following

    def of_everything(self) -> LedgerSnapshot:
        """Every block, with owners where the coordinator is known. Takes milliseconds."""
        owners = self._owners() if self._coordinator is not None else None
        blocks = [
            self._block(block, owners[block] if owners is not None else None)
            for block in range(1, self._pool.num_gpu_blocks)
        ]
        return LedgerSnapshot(self.counts(), blocks, is_complete=True)

    def _block(self, block_id: int, owners: int | None) -> BlockFacts:
        block, offload = self._pool.blocks[block_id], self._offload
        is_lent = offload.holds(block_id)
        return BlockFacts(
            block=block_id,
            ref_count=int(block.ref_cnt),
            is_free=block.next_free_block is not None,
            is_hashed=block.block_hash is not None,
            is_lent=is_lent,
            is_reserved=self._ledger.is_reserved(block_id),
            is_draining=offload.is_draining(block_id),
            free_slots=offload.free_slots_of(block_id),
            busy_slots=offload.busy_slots_of(block_id) if is_lent else 0,
            settling_slots=offload.settling_slots_of(block_id) if is_lent else 0,
            chunks=offload.chunk_refs(block_id) if is_lent else (),
            is_empty=offload.is_empty(block_id),
            owners=owners,
        )

    def _owners(self) -> Counter[int]:
        """References to host blocks from all parts of vLLM that can hold one."""
        coordinator = self._coordinator
        held: Counter[int] = Counter()

        def add(blocks: Iterable[Any]) -> None:
            held.update(int(block.block_id) for block in blocks)

        manager = coordinator.host_manager
        for blocks in manager.req_to_blocks.values():
            add(blocks)
        for blocks in self._pool.holds.values():
            add(blocks)
        for pair in (*manager._pending_cow_copies, *coordinator._retained_copies.values()):
            add(pair)
        states = {id(one): one for one in coordinator.request_states.values()}
        for spill in coordinator.pending_spills.values():
            add([spill.host_block])
            states[id(spill.request_state)] = spill.request_state
        for state in states.values():
            add(detached_blocks(state.publication))
        own = set(map(id, self._pool.blocks))
        add(block for block in self._freed_later() if id(block) in own)
        return held


_SLICE_COST = 64
"""Weight of the blocks of one check; about 25 microseconds."""
_KEPT = 8
"""Violations that are kept for the report; the count continues."""


class LedgerWatch:
    """For one engine. ``total`` counts violations, each once while it lasts; it never decreases."""

    def __init__(self, ledger: HostLedger, reader: LedgerReader) -> None:
        self._ledger = ledger
        self._reader = reader
        self._next_block = 0
        self.found: tuple[LedgerViolation, ...] = ()
        self.total = 0

    def look(self) -> None:
        """Check the counters and the next few blocks."""
        snapshot, self._next_block = self._reader.of_blocks(self._next_block, _SLICE_COST)
        self._judge(violations(snapshot))

    def look_at_everything(self) -> list[LedgerViolation]:
        """Check every block and all owners; freezes on a violation, too."""
        found = violations(self._reader.of_everything())
        self._judge(found)
        return found

    def require_sound(self) -> None:
        """Raises ``ValueError`` naming the violation while the ledger is frozen."""
        if self.found:
            more = f" and {self.total - 1} more" if self.total > 1 else ""
            raise ValueError(
                f"levers are frozen: the host ledger broke {self.found[0].rule} "
                f"({self.found[0].sentence}{more}); thaw them when the cause is known"
            )

    def clear(self) -> None:
        """End the freeze if the ledger is sound now. Raises ``ValueError`` when it is not."""
        found = violations(self._reader.of_everything())
        if found:
            self._judge(found)
            self.require_sound()
        self.found = ()
        self._ledger.frozen = False

    def _judge(self, found: list[LedgerViolation]) -> None:
        if not found:
            return
        self._ledger.frozen = True
        known = {one.rule for one in self.found}
        new = [one for one in found if one.rule not in known]
        self.total += len(new)
        self.found = (*self.found, *new)[:_KEPT]
