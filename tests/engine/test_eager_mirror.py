"""``eager_host_mirror`` changes when rows are copied to the host, and no token."""

from __future__ import annotations

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
)

pytestmark = pytest.mark.engine

SMALL = EngineShape(gpu_blocks=420, ack_lag_steps=3)


def run(folder: Path, shape: EngineShape) -> tuple[Run, Any]:
    """The answers, and the connectors with what they counted."""
    engine = build_engine(folder, shape)
    apply(engine, {"offload_target_blocks": 700})
    talks = make_conversations(count=8, turns=3, first=400, later=60, answer=40, seed=5)
    return converse(engine, talks), core_of(engine).model_executor._connectors


@pytest.fixture(scope="module")
def ample(folder: Path) -> Run:
    return run(folder, EngineShape())[0]


@pytest.fixture(scope="module")
def eager(folder: Path) -> tuple[Run, Any]:
    return run(folder, SMALL)


@pytest.fixture(scope="module")
def lazy(folder: Path) -> tuple[Run, Any]:
    return run(folder, replace(SMALL, eager_host_mirror=False))


def test_with_it_pages_that_leave_the_gpu_move_nothing(ample: Run, eager: tuple[Run, Any]) -> None:
    answers, connectors = eager
    assert answers.answers == ample.answers
    assert answers.residency_seen == {"full", "mixed", "none"}
    assert connectors.spilled_pages == 0


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


def test_drafts_do_not_reach_the_host_before_they_are_accepted_without_it(
    folder: Path, ample: Run
) -> None:
    shape = replace(SMALL, eager_host_mirror=False, speculative_tokens=3, gpu_blocks=700)
    assert run(folder, shape)[0].answers == ample.answers
