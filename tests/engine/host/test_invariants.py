"""Each invariant of the ledger is broken once, on a snapshot that is sound but for that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hisparsed.engine.host.invariants import (
    BlockFacts,
    BlockState,
    CountFacts,
    LedgerSnapshot,
    Rule,
    Tenant,
    violations,
)

PER_BLOCK = 4
IDLE = BlockFacts(1, 0, True, False, False, False, False, 0, 0, 0, (), owners=0)
CACHED = replace(IDLE, block=2, is_hashed=True)
IN_USE = replace(IDLE, block=3, ref_count=2, is_free=False, is_hashed=True, owners=2)
LENT = BlockFacts(4, 1, False, False, True, False, False, 1, 3, 0, (0, -1, 2))
DRAINING = BlockFacts(5, 1, False, False, True, False, True, 0, 2, 1, (1,))
RESERVE = BlockFacts(6, 1, False, False, False, True, False, 0, 0, 0, ())
BLOCKS = (IDLE, CACHED, IN_USE, LENT, DRAINING, RESERVE)
COUNTS = CountFacts(
    budget=6,
    hisparse_capacity=3,
    hisparse_in_use=1,
    hisparse_idle=2,
    pending=0,
    floor=2,
    offload_target=1,
    reserve_target=1,
    referenced=4,
    held=3,
    lent=2,
    draining=1,
    drained=0,
    reserve=1,
    idle_cached=1,
    chunks_per_block=PER_BLOCK,
    free_slots=1,
    stored=4,
    evictable=1,
    settling=1,
    write_pending=1,
    draining_busy_slots=2,
)


def broken(snapshot: LedgerSnapshot) -> set[Rule]:
    return {one.rule for one in violations(snapshot)}


def test_a_sound_ledger_has_no_violations() -> None:
    assert violations(LedgerSnapshot(COUNTS, BLOCKS, is_complete=True)) == []


def test_every_block_has_one_tenant_and_one_state() -> None:
    assert [(one.tenant, one.state) for one in BLOCKS] == [
        (Tenant.HISPARSE, BlockState.IDLE),
        (Tenant.HISPARSE, BlockState.IDLE),
        (Tenant.HISPARSE, BlockState.IN_USE),
        (Tenant.OFFLOAD, BlockState.IN_USE),
        (Tenant.OFFLOAD, BlockState.DRAINING),
        (Tenant.RESERVE, BlockState.IDLE),
    ]
    assert replace(LENT, chunks=(0, 0, 0)).state is BlockState.IDLE


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"hisparse_idle": 3}, Rule.BUDGET_ADDS_UP),
        ({"referenced": 3}, Rule.BUDGET_ADDS_UP),
        ({"held": 2}, Rule.HELD_ADDS_UP),
        ({"floor": 4}, Rule.FLOOR_KEPT),
        ({"offload_target": 4}, Rule.TARGETS_FIT),
        ({"reserve_target": -1}, Rule.TARGETS_FIT),
        ({"idle_cached": 3}, Rule.IDLE_PREFIX_COUNT),
        ({"idle_cached": -1}, Rule.IDLE_PREFIX_COUNT),
        ({"free_slots": 2}, Rule.SLOTS_ADD_UP),
        ({"settling": 0}, Rule.SLOTS_ADD_UP),
        ({"write_pending": 4}, Rule.TRANSFERS_ADD_UP),
        ({"write_pending": -1}, Rule.TRANSFERS_ADD_UP),
        ({"drained": 2}, Rule.TRANSFERS_ADD_UP),
    ],
)
def test_counters_that_disagree_are_found(change: dict[str, int], rule: Rule) -> None:
    assert rule in broken(LedgerSnapshot(replace(COUNTS, **change)))


@pytest.mark.parametrize(
    ("block", "change", "rule"),
    [
        (LENT, {"is_reserved": True}, Rule.ONE_TENANT),
        (LENT, {"ref_count": 2}, Rule.HELD_ONCE),
        (LENT, {"is_free": True}, Rule.HELD_ONCE),
        (RESERVE, {"is_hashed": True}, Rule.HELD_ONCE),
        (RESERVE, {"ref_count": 0}, Rule.HELD_ONCE),
        (IDLE, {"is_free": False}, Rule.FREE_MEANS_UNUSED),
        (IN_USE, {"is_free": True}, Rule.FREE_MEANS_UNUSED),
        (IN_USE, {"owners": 1}, Rule.OWNERS_ACCOUNT_FOR_USE),
        (LENT, {"busy_slots": 2}, Rule.BLOCK_SLOTS),
        (LENT, {"free_slots": 2}, Rule.BLOCK_SLOTS),
        (DRAINING, {"free_slots": 1}, Rule.BLOCK_SLOTS),
        (LENT, {"is_empty": True}, Rule.BLOCK_SLOTS),
        (DRAINING, {"is_empty": True}, Rule.BLOCK_SLOTS),
        (LENT, {"chunks": (0, None, 2)}, Rule.CHUNK_IS_KNOWN),
        (DRAINING, {"chunks": (0,)}, Rule.DRAINING_HOLDS_NO_IDLE_CHUNK),
    ],
)
def test_a_block_that_breaks_a_rule_is_named(
    block: BlockFacts, change: dict[str, Any], rule: Rule
) -> None:
    (found,) = violations(LedgerSnapshot(COUNTS, [replace(block, **change)]))
    assert found.rule is rule
    assert found.sentence.startswith(f"host block {block.block} ")


@pytest.mark.parametrize("missing", range(len(BLOCKS)))
def test_a_whole_walk_finds_counters_that_are_not_true(missing: int) -> None:
    blocks = BLOCKS[:missing] + BLOCKS[missing + 1 :]
    assert broken(LedgerSnapshot(COUNTS, blocks, is_complete=True)) == {Rule.COUNTS_ARE_TRUE}


def test_every_rule_is_broken_by_some_test_here() -> None:
    tested = {
        mark
        for test in (
            test_counters_that_disagree_are_found,
            test_a_block_that_breaks_a_rule_is_named,
        )
        for mark in (case[-1] for case in test.pytestmark[0].args[1])  # type: ignore[attr-defined]
    }
    assert tested | {Rule.COUNTS_ARE_TRUE} == set(Rule)
