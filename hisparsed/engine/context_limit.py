"""The operator's limit on the length of a call, below the model's own, changeable live.

Judged when a call is tokenised and before it enters the engine. A longer call is refused with
the error that clients know from the model's limit, or waits until no other such call runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal


class CallTooLongError(ValueError):
    """The message names the limit and what the call asked for."""


@dataclass(frozen=True, slots=True)
class CallLength:
    """Tokens of prompt and answer. ``asked`` is ``None`` where the client set no limit."""

    prompt: int
    asked: int | None

    def beyond(self, limit: int) -> bool:
        """An answer of at least one token must fit beside the prompt."""
        return self.prompt + (self.asked or 1) > limit


class ContextLimit:
    """``max_tokens`` of ``None`` leaves the model's limit alone in force."""

    def __init__(self) -> None:
        self.max_tokens: int | None = None
        self.chars_per_token: int | None = None
        """Of the model's longest token; ``None`` until there is an engine."""
        self.over: Literal["wait", "refuse"] = "refuse"
        self.refused = 0
        self.waiting = 0
        self._long_call = asyncio.Lock()

    def refuses(self, least_tokens: int) -> str | None:
        """Why a prompt of at least so many tokens is refused before it is tokenised."""
        limit = self.max_tokens
        if limit is None or self.over == "wait" or least_tokens < limit:
            return None
        self.refused += 1
        return (
            f"This node takes calls of at most {limit} tokens for now. The prompt of this one has "
            f"at least {least_tokens}; shorten it."
        )

    def answer_tokens(self, length: CallLength) -> int | None:
        """What an answer without a limit of its own may have; ``None``: the model's rest.

        Raises ``CallTooLongError`` for a call that is refused.
        """
        limit = self.max_tokens
        if limit is None:
            return None
        if not length.beyond(limit):
            return limit - length.prompt if length.asked is None else None
        if self.over == "wait":
            return None
        self.refused += 1
        answer = "at least 1" if length.asked is None else str(length.asked)
        raise CallTooLongError(
            f"This node takes calls of at most {limit} tokens for now. This one has "
            f"{length.prompt} in the prompt and asks for {answer} in the answer; "
            "shorten one of them."
        )

    def must_take_turns(self, length: CallLength) -> bool:
        return self.max_tokens is not None and length.beyond(self.max_tokens)

    async def in_turn(self, outputs: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        """``outputs`` of a call beyond the limit, begun when no other such call runs."""
        self.waiting += 1
        try:
            await self._long_call.acquire()
        finally:
            self.waiting -= 1
        try:
            # Closed before the next one begins: a client that went away still holds the KV.
            async with aclosing(outputs):
                async for output in outputs:
                    yield output
        finally:
            self._long_call.release()
