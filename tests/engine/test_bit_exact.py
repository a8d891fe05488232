"""The proof that nothing is lost: same conversations, same tokens, wherever the KV was and
whenever it was copied.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conversations import (
    EngineShape,
    Run,
    apply,
    build_engine,
    converse,
    core_of,
    make_conversations,
    random_command,
    report,
)

from tests.examples import examples

pytestmark = [pytest.mark.engine, pytest.mark.examples]

COUNT, TURNS = examples(5, 10), examples(3, 4)
SMALL_SLAB = EngineShape(gpu_blocks=examples(300, 420))
LENT_BLOCKS = 700


def conversations() -> list[Any]:
    return make_conversations(COUNT, TURNS, examples(400, 500), later=80, answer=24, seed=3)


@pytest.fixture(scope="module")
def ample(folder: Path) -> Run:
    engine = build_engine(folder, EngineShape())
    apply(engine, {"offload_target_blocks": LENT_BLOCKS})
    return converse(engine, conversations())


def test_ample_slab_never_drops_a_page(ample: Run) -> None:
    hot = ample.last_report["hot"]
    assert "none" not in ample.residency_seen
    assert hot["resident_total"] > 0.99 * hot["references_total"]
    assert ample.hit_tokens > 0
    assert len({tuple(answer) for answers in ample.answers.values() for answer in answers}) == (
        COUNT * TURNS
    )


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_moving_everything_at_random_gives_the_same_tokens(
    folder: Path, ample: Run, seed: int
) -> None:
    engine = build_engine(folder, replace(SMALL_SLAB, host_budget_bytes=20 << 20, ack_lag_steps=3))
    budget = report(engine)["geometry"]["budget_blocks"]
    rng = random.Random(seed)
    moves = 0

    def move(step: int) -> None:
        nonlocal moves
        if step % 2:
            return
        moves += 1
        apply(engine, random_command(rng, budget))
        check_ledger(engine)

    resizes = WatchedLeases(engine)
    moved = converse(engine, conversations(), lambda step: (move(step), resizes.look())[0])
    assert moved.answers == ample.answers
    assert moves > 40
    assert moved.residency_seen == {"full", "mixed", "none"}
    assert resizes.grown > 3, "running requests must have been given more hot blocks"
    assert resizes.shrunk > 3, "running requests must have given hot blocks back"


class WatchedLeases:
    """Counts requests whose hot buffer changed size while they ran."""

    def __init__(self, engine: Any) -> None:
        self._manager = core_of(engine).scheduler.hisparsed._hot[0]
        self._held: dict[str, int] = {}
        self.grown = 0
        self.shrunk = 0

    def look(self) -> None:
        held = {name: len(blocks) for name, blocks in self._manager.req_to_blocks.items() if blocks}
        for name, blocks in held.items():
            before = self._held.get(name, blocks)
            self.grown += blocks > before
            self.shrunk += blocks < before
        self._held = held


def check_ledger(engine: Any) -> None:
    """Every invariant of the ledger, and the count of pages that are only on the host."""
    control = core_of(engine).scheduler.hisparsed
    assert control.host.watch.look_at_everything() == []
    for resident in control._resident:
        for request in core_of(engine).scheduler.running:
            row = resident.get_residency_row(request.request_id)
            host_only = resident.host_only_pages.get(request.request_id, 0)
            assert host_only == sum(block.is_null for block in row)


SMALL = replace(SMALL_SLAB, ack_lag_steps=3)


def run(folder: Path, shape: EngineShape) -> tuple[Run, Any]:
    """The answers, and the connectors with what they counted."""
    engine = build_engine(folder, shape)
    apply(engine, {"offload_target_blocks": LENT_BLOCKS})
    return converse(engine, conversations()), core_of(engine).model_executor._connectors


@pytest.fixture(scope="module")
def eager(folder: Path) -> tuple[Run, Any]:
    return run(folder, SMALL)


@pytest.fixture(scope="module")
def lazy(folder: Path) -> tuple[Run, Any]:
    return run(folder, replace(SMALL, eager_host_mirror=False))


def test_a_small_slab_gives_the_same_tokens_and_pages_that_leave_the_gpu_move_nothing(
    ample: Run, eager: tuple[Run, Any]
) -> None:
    answers, connectors = eager
    assert answers.answers == ample.answers
    assert answers.residency_seen == {"full", "mixed", "none"}
    assert connectors.spilled_pages == 0
    hot = answers.last_report["hot"]
    assert hot["resident_total"] < 0.3 * hot["references_total"], "most is read from the host"
    kinds = ("resident_total", "hits_total", "loads_total", "spills_total")
    assert hot["references_total"] == sum(hot[kind] for kind in kinds)


@pytest.mark.long
def test_without_it_decode_rows_move_with_their_page(
    ample: Run, eager: tuple[Run, Any], lazy: tuple[Run, Any]
) -> None:
    answers, connectors = lazy
    assert answers.answers == ample.answers
    assert answers.residency_seen == {"full", "mixed", "none"}
    assert connectors.spilled_pages > 0
    assert connectors.mirrored_bytes < eager[1].mirrored_bytes


def test_the_same_prefixes_are_found_with_and_without_it(
    eager: tuple[Run, Any], lazy: tuple[Run, Any]
) -> None:
    assert eager[0].hit_tokens > 0
    assert lazy[0].hit_tokens == eager[0].hit_tokens


@pytest.mark.long
def test_drafts_do_not_reach_the_host_before_they_are_accepted_without_it(
    folder: Path, ample: Run
) -> None:
    shape = replace(SMALL, eager_host_mirror=False, speculative_tokens=3, gpu_blocks=700)
    assert run(folder, shape)[0].answers == ample.answers
