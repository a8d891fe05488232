"""A stall as the control loop sees it: readiness, and the difference from a busy node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hisparsed.control.status.document import EngineState, EngineStatus
from hisparsed.control.text.status import status_page
from hisparsed.policy.schema import Mode
from hisparsed.policy.signals import GpuPool, Lever, Progress, Requests

POLICY = "version: 1\nstall_after: 10s\nlevers: {split: {mode: 'off'}}\n"
WAITING = Requests(0, 2, 0, 0, 0, 0, 0, held_back=0)


@pytest.fixture
async def node(make_node: Callable[[str], Any]) -> Any:
    node = make_node(POLICY)
    node.engine.changes = {
        "requests": WAITING,
        "gpu": GpuPool(400, 300, waiting_for_blocks=False, head_need_blocks=10),
    }
    await node.loop.start()
    return node


async def test_calls_that_wait_with_memory_free_and_no_step_are_a_stall(node: Any) -> None:
    await node.ticks(10)
    assert node.current.unready() is None
    await node.ticks(2)
    words = node.current.unready()
    assert "0 running and 2 waiting requests have made no progress for 11s" in words
    assert node.current.status().stalled == words


async def test_frozen_levers_hide_no_stall(node: Any) -> None:
    node.operator.freeze(Lever, actor="ann")
    await node.ticks(12)
    assert node.current.unready() is not None


async def test_an_engine_that_computes_is_busy_not_stalled(node: Any) -> None:
    for tokens in range(100, 130):
        node.engine.changes["progress"] = Progress(7, tokens)
        await node.ticks(1)
        assert node.current.unready() is None


async def test_a_shortage_of_memory_is_no_stall(node: Any) -> None:
    node.engine.changes |= {"gpu": GpuPool(400, 5, waiting_for_blocks=False, head_need_blocks=10)}
    await node.ticks(20)
    assert node.current.unready() is None


async def test_one_long_step_is_not_ready_but_no_stall(node: Any) -> None:
    """No report comes from inside a step."""
    await node.ticks(1)
    node.engine.report_trouble = [TimeoutError("busy")] * 30
    for _ in range(30):
        await node.ticks(1)
        assert node.current.status().stalled is None
    assert "the engine reported" in node.current.unready()
    node.engine.changes["progress"] = Progress(7, 10_000)
    await node.ticks(2)
    assert node.current.unready() is None
    assert node.current.status().stalled is None


async def test_progress_makes_the_node_ready_again(node: Any) -> None:
    await node.ticks(12)
    assert node.current.unready() is not None
    node.engine.changes["progress"] = Progress(7, 10_000)
    await node.ticks(1)
    assert node.current.unready() is None


async def test_the_effective_mode_joins_modes_and_freezes(node: Any) -> None:
    await node.ticks(1)
    assert node.current.status().policy.effective == "off 1/4"
    node.operator.set_mode([Lever.MULTIPLIER, Lever.ADMISSION], Mode.ADVISE, actor="ann")
    node.operator.freeze([Lever.WATERMARK], actor="ann")
    status = node.current.status()
    assert status.policy.effective == "advise 2/4, off 1/4, frozen 1/4"
    assert [one.mode for one in status.levers] == ["off", "advise", "advise", "act"], "at once"
    assert "mode advise 2/4, off 1/4, frozen 1/4, " in status_page(status, width=200)
    node.operator.freeze(Lever, actor="ann")
    assert node.current.status().policy.effective == "off 1/4, frozen 3/4"


@pytest.mark.parametrize("state", EngineState)
async def test_a_dead_engine_has_no_load(node: Any, state: EngineState) -> None:
    await node.ticks(1)
    node.engine_status = EngineStatus(state=state, since_unix_s=0, sentence="")
    reports = state in (EngineState.SERVING, EngineState.DRAINING)
    status = node.current.status()
    assert (status.observed is not None, status.derived is not None) == (reports, reports)
    assert ("report     none: " in status_page(status)) == (not reports)
    gauges = {sample.name for family in node.metrics.collect() for sample in family.samples}
    assert ("hisparsed_host_budget_bytes" in gauges) == reports
    assert "hisparsed_policy_generation" in gauges
