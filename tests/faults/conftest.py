"""A real listener around a scripted application, clients of raw bytes, and a real small disk."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "control"))

from edge import Edge
from state_node import RealDisk


@pytest.fixture
async def edge() -> AsyncIterator[Edge]:
    """With times so short that a test sees them pass."""
    served = Edge()
    await served.start()
    yield served
    await served.stop()


@pytest.fixture(autouse=True)
def _tasks_do_not_fail_unseen() -> Any:
    """An exception that asyncio would only log fails the test."""
    seen: list[dict[str, Any]] = []
    yield seen
    assert seen == []


@pytest.fixture(autouse=True)
async def _loop_reports(_tasks_do_not_fail_unseen: list[dict[str, Any]]) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: _tasks_do_not_fail_unseen.append(context))


@pytest.fixture
def real_disk(tmp_path: Path) -> Iterator[RealDisk]:
    disk = RealDisk(tmp_path / "disk")
    if not disk.mount():
        pytest.skip("this machine lets us mount nothing")
    yield disk
    disk.unmount()
