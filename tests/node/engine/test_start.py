"""The time between an engine that is up and one that serves: its end and a stop end that too."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hisparsed.errors import EngineStartError
from hisparsed.node.engine.start import StoppedWhileStarting, while_it_lives


class Beginning:
    """As with vLLM, whose calls wait for an engine's answer without a limit."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.answer = asyncio.Event()
        self.cancelled = False
        self.stop = asyncio.Event()
        self.alive = True

    async def ask(self) -> Any:
        self.asked.set()
        try:
            await self.answer.wait()
            if not self.alive:
                raise LookupError("what vLLM says of it")
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return "a session"

    async def result(self) -> Any:
        async with asyncio.timeout(10):
            return await while_it_lives(self.ask(), lambda: self.alive, self.stop)


@pytest.fixture
async def beginning() -> Beginning:
    return Beginning()


async def test_an_engine_that_answers_serves(beginning: Beginning) -> None:
    beginning.answer.set()
    assert await beginning.result() == "a session"


async def test_one_that_dies_before_it_answers_did_not_start(beginning: Beginning) -> None:
    asked = asyncio.create_task(beginning.result())
    await beginning.asked.wait()
    beginning.alive = False
    with pytest.raises(EngineStartError, match="ended before it served"):
        await asked
    assert beginning.cancelled


async def test_what_vllm_says_of_a_dead_engine_is_that_it_did_not_start(
    beginning: Beginning,
) -> None:
    asked = asyncio.create_task(beginning.result())
    await beginning.asked.wait()
    beginning.alive = False
    beginning.answer.set()
    with pytest.raises(EngineStartError, match="ended before it served"):
        await asked


async def test_a_stop_is_not_kept_waiting_by_it(beginning: Beginning) -> None:
    asked = asyncio.create_task(beginning.result())
    await beginning.asked.wait()
    beginning.stop.set()
    with pytest.raises(StoppedWhileStarting):
        await asked
    assert beginning.cancelled
