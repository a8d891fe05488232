"""One call may ask for 16,384 answers, and holds the event loop while they are made.

``VLLM_MAX_N_SEQUENCES`` is 16,384 by default. ``AsyncLLM.add_request`` copies the request that many
times and registers each copy, without giving way to other calls; the engine core then has that many
requests in its queue before any other client's next one.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any
from unittest.mock import MagicMock

from tests.upstream.outcome import run

ANSWERS = 16_384


async def fan_out(params: Any) -> tuple[float, int]:
    """Seconds that it takes, and how often another task of the event loop ran meanwhile."""
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import OutputProcessor

    turns = 0

    async def other_calls() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def to_engine_core(request: Any) -> None:
        """A socket that takes everything at once."""

    front = MagicMock()
    front.errored = False
    front.log_requests = False
    front.output_processor = OutputProcessor(None, log_stats=False)
    front.engine_core.add_request_async = to_engine_core
    front._add_request = AsyncLLM._add_request.__get__(front)
    request = EngineCoreRequest(
        request_id="call",
        prompt_token_ids=[1, 2, 3],
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    request.external_req_id = "call"
    others = asyncio.ensure_future(other_calls())
    await asyncio.sleep(0)
    began_s, began = time.perf_counter(), turns
    await AsyncLLM.add_request(front, "call", request, params)
    others.cancel()
    ended_s, ended = time.perf_counter(), turns
    return ended_s - began_s, ended - began


def reproduce() -> str | None:
    from vllm import SamplingParams

    try:
        params = SamplingParams(n=ANSWERS, max_tokens=1)
    except ValueError:
        return None
    seconds, turns = asyncio.run(fan_out(params))
    if turns:
        return None
    return (
        f"n={ANSWERS} is accepted. AsyncLLM.add_request makes the requests in {seconds:.2f} s, in "
        "which no other task of the event loop ran."
    )


if __name__ == "__main__":
    run(reproduce)
