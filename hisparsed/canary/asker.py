"""The canary's questions put to a running ``AsyncLLM``, beside the gate and its limits.

Each goes by a random id that the engine is told first, and with a cache salt of this engine's
life, so that no client shares its pages. Knows nothing of when to ask or what to expect.
"""

from __future__ import annotations

import asyncio
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from hisparsed.canary.question import Answer, Question
from hisparsed.engine.messages import CanaryCall

if TYPE_CHECKING:
    from hisparsed.engine.handle import EngineHandle

_ANSWER_WITHIN_S = 300.0
"""A busy node is slow; one that does not answer at all is the watchdog's."""


class CanaryAsker:
    """Implements ``CanaryEngine`` over an ``EngineHandle``."""

    def __init__(self, handle: EngineHandle) -> None:
        self._handle = handle
        self._salt = token_hex(16)

    def tokens_of(self, text: str) -> list[int]:
        return list(self._handle.llm.get_tokenizer().encode(text, add_special_tokens=False))

    async def ask(self, question: Question) -> Answer:
        """Raises ``TimeoutError``, ``EngineGone``, or what vLLM raises when it refuses."""
        request_id = f"canary-{token_hex(16)}"
        call = CanaryCall(request_id=request_id, residency=question.residency)
        await self._handle.begin_canary(call)
        try:
            async with asyncio.timeout(_ANSWER_WITHIN_S):
                tokens, hit = await self._generate(question, request_id)
        finally:
            seen = await self._handle.end_canary(request_id)
        return Answer(tokens, hit, seen)

    async def _generate(self, question: Question, request_id: str) -> tuple[tuple[int, ...], int]:
        prompt = {"prompt_token_ids": list(question.prompt), "cache_salt": self._salt}
        tokens: tuple[int, ...] = ()
        hit = 0
        async for output in self._handle.llm.generate(
            prompt, sampling_of(question), request_id=request_id
        ):
            tokens = tuple(output.outputs[0].token_ids)
            hit = int(output.num_cached_tokens or 0)
        return tokens, hit


def sampling_of(question: Question) -> Any:
    """vLLM's ``SamplingParams``: greedy, of exactly the length asked for, in one output."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0,
        max_tokens=question.tokens,
        ignore_eos=True,
        skip_reading_prefix_cache=question.recompute,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
