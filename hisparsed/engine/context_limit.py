"""The operator's limit on the length of a call, below the model's own, changeable live.

Judged when a call is tokenised and before it enters the engine. If the prompt fits, the answer is
limited to the rest, because clients ask for a fixed large one; a prompt that leaves no room is
refused in vLLM's own words, which clients know. Or such calls wait until no other one runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal


class CallTooLongError(ValueError):
    """The message names the limit and the length of the prompt."""


@dataclass(frozen=True, slots=True)
class CallLength:
    """Tokens of prompt and answer. ``asked`` is ``None`` where the client set no limit."""

    prompt: int
    asked: int | None

    def beyond(self, limit: int) -> bool:
        """An answer of at least one token must fit next to the prompt."""
        return self.prompt + (self.asked or 1) > limit


class ContextLimit:
    """``max_tokens`` of ``None`` leaves only the model's limit in force."""

    def __init__(self) -> None:
        self.max_tokens: int | None = None
        self.model_tokens: int | None = None
        """The model's own limit; ``None`` until there is an engine."""
        self.chars_per_token: int | None = None
        """Of the model's longest token; ``None`` until there is an engine."""
        self.over: Literal["wait", "refuse"] = "refuse"
        self.refused = 0
        self.waiting = 0
        self.held_total = 0
        """Calls beyond the limit so far that had to wait for another one."""
        self._long_call = asyncio.Lock()

    @property
    def in_force(self) -> int | None:
        """The longest call that is served without waiting for a turn."""
        limits = [self.model_tokens, None if self.over == "wait" else self.max_tokens]
        return min((one for one in limits if one is not None), default=None)

    @staticmethod
    def words(limit: int, prompt: int, *, at_least: bool = False) -> str:
        """The error for a prompt that does not fit, in vLLM's words, which clients look for."""
        tokens = f"at least {prompt}" if at_least else str(prompt)
        return ContextLimit.overflow(
            limit, f"your prompt contains {tokens} input tokens, which leaves no room for an answer"
        )

    @staticmethod
    def overflow(limit: int, why: str) -> str:
        """The error for a call beyond ``limit``, in the form that clients know; ``why`` is the
        reason."""
        return (
            f"This model's maximum context length is {limit} tokens. However, {why}. Please reduce "
            "the length of the input prompt."
        )

    def refuses(self, least_tokens: int) -> str | None:
        """Why a prompt of at least this many tokens is refused before it is tokenised."""
        limit = self.in_force
        if limit is None or least_tokens < limit:
            return None
        self._count_refused(limit)
        return self.words(limit, least_tokens, at_least=True)

    def answer_tokens(self, length: CallLength) -> int | None:
        """The tokens that the answer may have, if that is less than asked or no number was asked;
        ``None``: as asked, or the model's rest.

        Raises ``CallTooLongError`` for a prompt that leaves no room.
        """
        limit = self.max_tokens
        if limit is None or self.over == "wait":
            return None
        left = limit - length.prompt
        if left >= 1:
            return left if length.asked is None or length.asked > left else None
        self._count_refused(limit)
        raise CallTooLongError(self.words(limit, length.prompt))

    def _count_refused(self, limit: int) -> None:
        """The model's own limit is checked elsewhere."""
        self.refused += limit == self.max_tokens

    def must_take_turns(self, length: CallLength) -> bool:
        return self.max_tokens is not None and length.beyond(self.max_tokens)

    async def in_turn(self, outputs: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        """``outputs`` of a call beyond the limit, begun when no other such call runs."""
        self.waiting += 1
        self.held_total += self._long_call.locked()
        try:
            await self._long_call.acquire()
        finally:
            self.waiting -= 1
        try:
            # Closed before the next one begins: the call of a client that disconnected still holds
            # KV.
            async with aclosing(outputs):
                async for output in outputs:
                    yield output
        finally:
            self._long_call.release()
