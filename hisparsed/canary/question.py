"""What the canary asks, and what comes back: one fixed prompt, answered greedily.

The text is made up here and holds nothing of any user. Who answers stands behind
``CanaryEngine``; whether an answer is right is decided elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from hisparsed.engine.messages import CanaryReport, GeometryReport, Residency

_PRIME = 7919
_LEAST_PAGES = 6
_SHARE_OF_LONGEST = 4
"""The prompt takes at most this part of the longest call, so that it never crowds a node."""


@dataclass(frozen=True, slots=True)
class Question:
    """``recompute`` reads no prefix: every row is written anew."""

    prompt: tuple[int, ...]
    tokens: int
    residency: Residency
    recompute: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: tuple[int, ...]
    prefix_hit_tokens: int
    seen: CanaryReport


class CanaryEngine(Protocol):
    """Raises ``EngineGone`` once the engine has died; any other exception is one failed call."""

    def tokens_of(self, text: str) -> list[int]:
        """Token ids of ``text`` in the model's own words."""
        ...

    async def ask(self, question: Question) -> Answer: ...


def prompt_tokens(prefix: float, geometry: GeometryReport) -> int:
    """Length of the prompt for ``prefix`` times the top-k.

    In a prompt many times the top-k most rows are never selected, and harm to them not seen. A
    few pages are needed so that some can leave the GPU: the last ones always stay.
    """
    wanted = max(round(prefix * geometry.topk), _LEAST_PAGES * geometry.block_tokens)
    return min(wanted, geometry.max_model_len // _SHARE_OF_LONGEST)


def make_prompt(engine: CanaryEngine, wanted: int) -> tuple[int, ...]:
    """Token ids of a prompt of ``wanted`` tokens; the beginning of any longer one."""
    lines = max(1, wanted // 16)
    while len(found := engine.tokens_of(_text(lines))) < wanted:
        lines *= 2
    return tuple(found[:wanted])


def _text(lines: int) -> str:
    """Numbered lines that all differ, so that each page has rows of its own."""
    return "".join(
        f"Shelf {number} holds {number * _PRIME % 9973} boxes and {number * 31 % 97} keys.\n"
        for number in range(1, lines + 1)
    )


def questions_of_a_round(prompt: tuple[int, ...], tokens: int) -> tuple[Question, ...]:
    """What is held is read first, from the host alone and from both; then all is computed anew."""
    return (
        Question(prompt, tokens, "none"),
        Question(prompt, tokens, "mixed"),
        Question(prompt, tokens, "full", recompute=True),
    )


def first_questions(prompt: tuple[int, ...], tokens: int) -> tuple[Question, ...]:
    """The first answer, computed anew, is the one that all others must equal."""
    none, mixed, full = questions_of_a_round(prompt, tokens)
    return (full, none, mixed)
