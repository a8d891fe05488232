"""Memory of reserve blocks goes back to the operating system, and serving continues without a
difference."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import psutil
import pytest
from conversations import (
    EngineShape,
    apply,
    build_engine,
    converse,
    core_of,
    make_conversations,
    report,
)

from hisparsed.engine.reference.store import HostBuffer, runs

pytestmark = pytest.mark.engine

SHAPE = EngineShape(gpu_blocks=420, host_budget_bytes=96 << 20)
MIB = 1 << 20


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def test_runs_of_neighbours() -> None:
    assert runs([]) == []
    assert runs([3, 4, 5, 9, 11, 12]) == [(3, 6), (9, 10), (11, 13)]


def test_only_whole_pages_are_released_and_the_rest_keeps_its_bytes() -> None:
    buffer = HostBuffer(8 * mmap.PAGESIZE, 0x55)
    released = buffer.release([(100, 2 * mmap.PAGESIZE + 100), (5 * mmap.PAGESIZE, 5 * 4096 + 1)])
    assert released == mmap.PAGESIZE
    second = buffer.bytes[mmap.PAGESIZE : 2 * mmap.PAGESIZE]
    assert not second.any()
    assert (buffer.bytes == 0x55).sum() == 7 * mmap.PAGESIZE
    second.fill_(7)
    assert (second == 7).all(), "released memory can be written again"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return build_engine(tmp_path_factory.mktemp("release"), SHAPE)


def test_the_reserve_shrinks_the_process_and_comes_back_exact(engine: Any, tmp_path: Path) -> None:
    geometry = report(engine)["geometry"]
    reserve = round(0.6 * geometry["budget_blocks"])
    reserve_bytes = reserve * geometry["host_block_bytes"]
    assert reserve_bytes > 50 * MIB
    before = resident_bytes()
    apply(engine, {"reserve_target_blocks": reserve})
    assert report(engine)["reserve"]["released_bytes"] == 0, "only where it is asked for"
    apply(engine, {"release_reserve": True})
    host = report(engine)
    assert (host["reserve"]["can_release"], host["reserve"]["blocks"]) == (True, reserve)
    assert 0.95 * reserve_bytes < host["reserve"]["released_bytes"] <= reserve_bytes
    assert before - resident_bytes() > 0.9 * reserve_bytes
    apply(engine, {"reserve_target_blocks": 0})
    assert report(engine)["reserve"]["released_bytes"] == 0
    talk, again = (
        make_conversations(count=3, turns=2, first=400, later=60, answer=8, seed=4)
        for _ in range(2)
    )
    untouched = build_engine(tmp_path, SHAPE)
    assert converse(engine, talk).answers == converse(untouched, again).answers


def test_a_pinned_node_says_so_and_refuses(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = core_of(engine).model_executor
    monkeypatch.setattr(type(executor), "release_host", None)
    assert report(engine)["reserve"]["can_release"] is False
    with pytest.raises(ValueError, match="release_reserve: the host memory of this node is pinned"):
        apply(engine, {"release_reserve": True, "reserve_target_blocks": 10})
    assert report(engine)["reserve"]["target_blocks"] == 0
