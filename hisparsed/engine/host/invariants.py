"""The invariants of the host ledger: one pure function from a snapshot to violations.

Tests, fuzzing and the running engine use the same rules; the engine passes in snapshots of counters
only, or of a few blocks, and tests whole ones. ``check`` takes the snapshots from vLLM's objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from hisparsed.engine.host.ledger import LedgerCounts
from hisparsed.policy.signals import LedgerViolation


class Tenant(StrEnum):
    """The tenant of a host block."""

    HISPARSE = "hisparse"
    OFFLOAD = "offload"
    RESERVE = "reserve"


class BlockState(StrEnum):
    """The use of a host block. *Pending* is not the state of one block: it counts the blocks that a
    tenant is still to get, and any block of HiSparse that becomes idle is one of them."""

    IDLE = "idle"
    IN_USE = "in use"
    DRAINING = "draining"


class Rule(StrEnum):
    """Names of the invariants; stable, for alarms and the journal."""

    BUDGET_ADDS_UP = "budget-adds-up"
    HELD_ADDS_UP = "held-adds-up"
    FLOOR_KEPT = "floor-kept"
    TARGETS_FIT = "targets-fit"
    IDLE_PREFIX_COUNT = "idle-prefix-count"
    SLOTS_ADD_UP = "slots-add-up"
    TRANSFERS_ADD_UP = "transfers-add-up"
    COUNTS_ARE_TRUE = "counts-are-true"
    ONE_TENANT = "one-tenant"
    HELD_ONCE = "held-once"
    FREE_MEANS_UNUSED = "free-means-unused"
    OWNERS_ACCOUNT_FOR_USE = "owners-account-for-use"
    BLOCK_SLOTS = "block-slots"
    CHUNK_IS_KNOWN = "chunk-is-known"
    DRAINING_HOLDS_NO_IDLE_CHUNK = "draining-holds-no-idle-chunk"


@dataclass(frozen=True, kw_only=True)
class CountFacts(LedgerCounts):
    """The ledger's counts, and those of both pools that must agree with them."""

    floor: int
    referenced: int
    """Blocks that anybody holds, the ledger included."""
    held: int
    """Blocks that the pool has given to the ledger."""
    drained: int
    """Draining blocks whose transfers have ended."""
    idle_cached: int
    chunks_per_block: int
    free_slots: int
    stored: int
    evictable: int
    settling: int
    write_pending: int
    draining_busy_slots: int


@dataclass(frozen=True, slots=True)
class BlockFacts:
    """One host block. Slots count only where it is lent."""

    block: int
    ref_count: int
    is_free: bool
    """Whether it is in the pool's free queue."""
    is_hashed: bool
    is_lent: bool
    is_reserved: bool
    is_draining: bool
    free_slots: int
    busy_slots: int
    settling_slots: int
    chunks: tuple[int | None, ...]
    """Reference counts of its chunks; ``None`` for one that the cache does not know."""
    is_empty: bool = False
    """Whether the offload pool would return it without a search for chunks."""
    owners: int | None = None
    """References that requests and transfers account for; ``None`` where not counted."""

    @property
    def tenant(self) -> Tenant:
        if self.is_lent:
            return Tenant.OFFLOAD
        return Tenant.RESERVE if self.is_reserved else Tenant.HISPARSE

    @property
    def state(self) -> BlockState:
        if self.is_draining:
            return BlockState.DRAINING
        if self.is_lent:
            moving = self.settling_slots or any(self.chunks)
            return BlockState.IN_USE if moving else BlockState.IDLE
        if self.is_reserved or self.ref_count == 0:
            return BlockState.IDLE
        return BlockState.IN_USE


@dataclass(frozen=True, slots=True)
class LedgerSnapshot:
    """Counters, and the blocks that were looked at: none, some, or ``whole``."""

    counts: CountFacts
    blocks: Sequence[BlockFacts] = ()
    is_complete: bool = False


def violations(snapshot: LedgerSnapshot) -> list[LedgerViolation]:
    """Every broken invariant of ``snapshot``; empty when the ledger is sound."""
    found = list(_of_counts(snapshot.counts))
    for facts in snapshot.blocks:
        found.extend(_of_block(facts, snapshot.counts.chunks_per_block))
    if snapshot.is_complete:
        found.extend(_of_sums(snapshot.counts, snapshot.blocks))
    return found


def _of_counts(counts: CountFacts) -> Iterator[LedgerViolation]:
    if counts.hisparse_idle + counts.referenced != counts.budget:
        yield LedgerViolation(
            Rule.BUDGET_ADDS_UP,
            f"{counts.hisparse_idle} free and {counts.referenced} referenced blocks are not the "
            f"budget of {counts.budget}",
        )
    if counts.lent + counts.reserve != counts.held:
        yield LedgerViolation(
            Rule.HELD_ADDS_UP,
            f"{counts.lent} lent and {counts.reserve} reserve blocks are not the {counts.held} "
            "that HiSparse has given up",
        )
    capacity = counts.budget - counts.lent - counts.reserve
    if capacity < counts.floor:
        yield LedgerViolation(
            Rule.FLOOR_KEPT, f"HiSparse has {capacity} blocks, below its floor of {counts.floor}"
        )
    room = counts.budget - counts.floor
    if min(counts.offload_target, counts.reserve_target) < 0 or (
        counts.offload_target + counts.reserve_target > room
    ):
        yield LedgerViolation(
            Rule.TARGETS_FIT,
            f"targets of {counts.offload_target} lent and {counts.reserve_target} reserve blocks "
            f"do not fit the {room} above the floor",
        )
    if not 0 <= counts.idle_cached <= counts.hisparse_idle:
        yield LedgerViolation(
            Rule.IDLE_PREFIX_COUNT,
            f"{counts.idle_cached} idle blocks with a prefix, of {counts.hisparse_idle} free ones",
        )
    usable = (counts.lent - counts.draining) * counts.chunks_per_block
    busy = counts.stored + counts.settling
    if counts.free_slots + busy - counts.draining_busy_slots != usable:
        yield LedgerViolation(
            Rule.SLOTS_ADD_UP,
            f"{counts.free_slots} free slots and {busy} busy ones, {counts.draining_busy_slots} "
            f"of them draining, are not the {usable} of usable blocks",
        )
    in_flight = counts.stored - counts.evictable
    if not 0 <= counts.write_pending <= in_flight or not 0 <= counts.drained <= counts.draining:
        yield LedgerViolation(
            Rule.TRANSFERS_ADD_UP,
            f"{counts.write_pending} stores of {in_flight} transfers in flight, {counts.drained} "
            f"blocks drained of {counts.draining}",
        )


def _of_block(facts: BlockFacts, chunks_per_block: int) -> Iterator[LedgerViolation]:
    name = f"host block {facts.block}"
    if facts.is_lent and facts.is_reserved:
        yield LedgerViolation(Rule.ONE_TENANT, f"{name} is lent and in reserve")
    if facts.is_lent or facts.is_reserved:
        if facts.ref_count != 1 or facts.is_free or facts.is_hashed:
            yield LedgerViolation(
                Rule.HELD_ONCE,
                f"{name} of the {facts.tenant} has {facts.ref_count} references, "
                f"{'is' if facts.is_free else 'is not'} in HiSparse's free queue and "
                f"{'holds' if facts.is_hashed else 'holds no'} prefix",
            )
    elif facts.is_free != (facts.ref_count == 0):
        yield LedgerViolation(
            Rule.FREE_MEANS_UNUSED,
            f"{name} has {facts.ref_count} references and {'is' if facts.is_free else 'is not'} "
            "in the free queue",
        )
    elif facts.owners is not None and facts.ref_count != facts.owners:
        yield LedgerViolation(
            Rule.OWNERS_ACCOUNT_FOR_USE,
            f"{name} has {facts.ref_count} references, requests and transfers account for "
            f"{facts.owners}",
        )
    if facts.is_lent:
        yield from _of_slots(facts, name, chunks_per_block)


def _of_slots(facts: BlockFacts, name: str, chunks_per_block: int) -> Iterator[LedgerViolation]:
    busy = len(facts.chunks) + facts.settling_slots
    expected_free = 0 if facts.is_draining else chunks_per_block - busy
    if busy != facts.busy_slots or facts.free_slots != expected_free:
        yield LedgerViolation(
            Rule.BLOCK_SLOTS,
            f"{name} has {facts.free_slots} free slots of {chunks_per_block}, {len(facts.chunks)} "
            f"chunks, {facts.settling_slots} settling, and counts {facts.busy_slots} as busy",
        )
    if facts.is_empty != (not busy and not facts.is_draining):
        yield LedgerViolation(
            Rule.BLOCK_SLOTS,
            f"{name} has {busy} busy slots and {'is' if facts.is_empty else 'is not'} taken for "
            "empty",
        )
    unknown = sum(ref_count is None for ref_count in facts.chunks)
    if unknown:
        yield LedgerViolation(
            Rule.CHUNK_IS_KNOWN,
            f"{name} has {unknown} chunks that the offload cache does not know by this place",
        )
    idle = sum(ref_count == 0 for ref_count in facts.chunks)
    if facts.is_draining and idle:
        yield LedgerViolation(
            Rule.DRAINING_HOLDS_NO_IDLE_CHUNK, f"{name} drains and still holds {idle} idle chunks"
        )


def _of_sums(counts: CountFacts, blocks: Sequence[BlockFacts]) -> Iterator[LedgerViolation]:
    lent = [facts for facts in blocks if facts.is_lent]
    chunks = [ref_count for facts in lent for ref_count in facts.chunks]
    idle_cached = sum(facts.is_free and facts.is_hashed for facts in blocks)
    for what, counted, walked in (
        ("blocks", counts.budget, len(blocks)),
        ("lent blocks", counts.lent, len(lent)),
        ("draining blocks", counts.draining, sum(facts.is_draining for facts in lent)),
        ("reserve blocks", counts.reserve, sum(facts.is_reserved for facts in blocks)),
        ("free blocks", counts.hisparse_idle, sum(facts.is_free for facts in blocks)),
        ("idle blocks with a prefix", counts.idle_cached, idle_cached),
        ("stored chunks", counts.stored, len(chunks)),
        ("idle chunks", counts.evictable, chunks.count(0)),
        ("chunks with a store in flight", counts.write_pending, chunks.count(-1)),
        ("settling slots", counts.settling, sum(facts.settling_slots for facts in lent)),
        ("free slots", counts.free_slots, sum(facts.free_slots for facts in lent)),
    ):
        if counted != walked:
            yield LedgerViolation(Rule.COUNTS_ARE_TRUE, f"{counted} {what} counted, {walked} found")
