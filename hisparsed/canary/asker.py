"""Asks the canary's questions of a running engine.

Questions bypass the limits of the API. Each has a random id that is announced to the engine first,
and a cache salt of this engine, so no client shares its pages.
"""

from __future__ import annotations

import asyncio
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from hisparsed.canary.round import CanaryAnswer, CanaryQuestion
from hisparsed.canary.verdict import Position, RecordedAnswer
from hisparsed.engine.messages import CanaryCall

if TYPE_CHECKING:
    from hisparsed.engine.launch import EngineHandle


_ANSWER_WITHIN_S = 300.0
"""A busy node is slow. A node that does not answer at all is left to the watchdog."""


class CanaryAsker:
    """Implements ``CanaryEngine`` over an ``EngineHandle``."""

    def __init__(self, handle: EngineHandle) -> None:
        self._handle = handle
        self._salt = token_hex(16)

    def tokens_of(self, text: str) -> list[int]:
        return list(self._handle.llm.get_tokenizer().encode(text, add_special_tokens=False))

    async def ask(self, question: CanaryQuestion) -> CanaryAnswer:
        """Raises ``TimeoutError``, ``EngineGone``, or what vLLM raises when it refuses."""
        request_id = f"canary-{token_hex(16)}"
        call = CanaryCall(request_id=request_id, residency=question.residency)
        await self._handle.begin_canary(call)
        try:
            async with asyncio.timeout(_ANSWER_WITHIN_S):
                positions, hit = await self._generate(question, request_id)
        finally:
            seen = await self._handle.end_canary(request_id)
        return CanaryAnswer(positions, hit, seen)

    async def _generate(
        self, question: CanaryQuestion, request_id: str
    ) -> tuple[RecordedAnswer, int]:
        llm = self._handle.llm
        prompt = {"prompt_token_ids": list(question.prompt), "cache_salt": self._salt}
        sampling = sampling_of(question, most_logprobs=llm.model_config.max_logprobs)
        positions: RecordedAnswer = ()
        hit = 0
        async for output in llm.generate(prompt, sampling, request_id=request_id):
            positions = positions_of(output)
            hit = int(output.num_cached_tokens or 0)
        return positions, hit


def positions_of(output: Any) -> RecordedAnswer:
    """Tokens and log probabilities of vLLM's ``RequestOutput``."""
    (answer,) = output.outputs
    return tuple(
        Position(int(token), {int(one): float(told.logprob) for one, told in listed.items()})
        for token, listed in zip(answer.token_ids, answer.logprobs, strict=True)
    )


LOGPROBS = 16
"""Of the best tokens at each position."""


def sampling_of(question: CanaryQuestion, *, most_logprobs: int = LOGPROBS) -> Any:
    """vLLM's ``SamplingParams``: greedy, of exactly the length asked for, in one output.

    ``most_logprobs``: what the engine allows; -1 is any number.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0,
        max_tokens=question.tokens,
        logprobs=LOGPROBS if most_logprobs < 0 else min(LOGPROBS, most_logprobs),
        ignore_eos=True,
        skip_reading_prefix_cache=question.recompute,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
