"""One round of the canary: when it is due, what it asks, and what the answers say.

A round asks one fixed prompt in each residency, greedily, with log probabilities. The text is made
up here and holds nothing of any user. Rounds are due once at the start, then by time and by how
much memory moved; a node with more work than it can do is skipped, and skipped rounds are counted.
Pure: time comes from outside, and ``CanaryEngine`` stands for the engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from hisparsed.canary.verdict import Finding, Judged, RecordedAnswer
from hisparsed.control.status.document import CanaryRun
from hisparsed.engine.messages import CanaryReport, Residency
from hisparsed.policy.schema import Canary
from hisparsed.policy.signals import PoolGeometry
from hisparsed.policy.units import counted


class Trigger(StrEnum):
    """Reasons for a round."""

    START = "start"
    PERIOD = "period"
    MOVE = "move"
    AGAIN = "again"
    """The baseline is being learned, or the last round was suspect."""
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class Conditions:
    """The node at one tick. Blocks are host blocks."""

    now_s: float
    waiting: int
    coverage_low: bool
    offload_target_blocks: int
    budget_blocks: int
    moving: bool
    """Whether blocks are assigned or recalled and have not moved yet."""


class CanarySchedule:
    """For one run of the engine. Call ``look`` every tick, ``ran`` when a round has begun."""

    def __init__(self) -> None:
        self.left_out = 0
        self._last_s = -math.inf
        self._tried_s = -math.inf
        self._target: int | None = None
        self._moved = 0

    def look(self, settings: Canary, seen: Conditions, *, again: bool = False) -> Trigger | None:
        """Why a round should begin now; ``None`` when none should. ``again``: as soon as the
        policy lets it."""
        if self._target is not None:
            self._moved += abs(seen.offload_target_blocks - self._target)
        self._target = seen.offload_target_blocks
        due = self._due(settings, seen) or (Trigger.AGAIN if again else None)
        if due is None or seen.now_s - self._tried_s < settings.least_gap:
            return None
        if seen.waiting > settings.most_waiting or seen.coverage_low:
            self.left_out += 1
            self._tried_s = seen.now_s
            return None
        return due

    def _due(self, settings: Canary, seen: Conditions) -> Trigger | None:
        if self._last_s == -math.inf:
            return Trigger.START
        if seen.now_s - self._last_s >= settings.every:
            return Trigger.PERIOD
        # While blocks move, the round waits until they have arrived.
        if self._moved >= settings.after_move * seen.budget_blocks and not seen.moving:
            return Trigger.MOVE
        return None

    def ran(self, now_s: float) -> None:
        """A round has begun, regardless of who asked for it."""
        self._last_s = self._tried_s = now_s
        self._moved = 0


_PRIME = 7919
_LEAST_PAGES = 6
_SHARE_OF_LONGEST = 4
"""The prompt takes at most this part of the longest call, so that it never crowds a node."""


@dataclass(frozen=True, slots=True)
class CanaryQuestion:
    """``recompute`` reads no prefix: every row is written again."""

    prompt: tuple[int, ...]
    tokens: int
    residency: Residency
    recompute: bool = False


@dataclass(frozen=True, slots=True)
class CanaryAnswer:
    positions: RecordedAnswer
    prefix_hit_tokens: int
    seen: CanaryReport

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(position.token for position in self.positions)


class CanaryEngine(Protocol):
    """Raises ``EngineGone`` once the engine has died; any other exception is one failed call."""

    def tokens_of(self, text: str) -> list[int]:
        """Token ids of ``text`` in the model's own words."""
        ...

    async def ask(self, question: CanaryQuestion) -> CanaryAnswer: ...


def prompt_tokens(prefix: float, geometry: PoolGeometry) -> int:
    """Length of the prompt for ``prefix`` times the top-k.

    In a prompt many times the top-k most rows are never selected, and harm to them not seen. A
    few pages are needed so that some can leave the GPU: the last ones always stay.
    """
    wanted = max(round(prefix * geometry.topk), _LEAST_PAGES * geometry.block_tokens)
    return min(wanted, geometry.max_model_len // _SHARE_OF_LONGEST)


def make_prompt(engine: CanaryEngine, wanted: int) -> tuple[int, ...]:
    """Token ids of a prompt of ``wanted`` tokens: a list, then its beginning a second time.

    The model continues with the rest of the list, which it reads from distant rows. It copies with
    large margins, so rounding changes few tokens, and damage to those rows shows.
    """
    again = wanted // _SHARE_AGAIN
    lines = max(1, wanted // 16)
    while len(found := engine.tokens_of(_text(lines))) < wanted:
        lines *= 2
    between = engine.tokens_of("\n\n")
    return (*found[: wanted - again - len(between)], *between, *found[:again])


_SHARE_AGAIN = 4
"""A part of the prompt is the beginning of the list again."""


def _text(lines: int) -> str:
    """Numbered lines that all differ, so that each page has its own rows."""
    return "".join(
        f"Shelf {number} holds {number * _PRIME % 9973} boxes and {number * 31 % 97} keys.\n"
        for number in range(1, lines + 1)
    )


def questions_of_a_round(prompt: tuple[int, ...], tokens: int) -> tuple[CanaryQuestion, ...]:
    """First the prefix that is held is read, from the host alone and from host and GPU; then
    everything is recomputed."""
    return (
        CanaryQuestion(prompt, tokens, "none"),
        CanaryQuestion(prompt, tokens, "mixed"),
        CanaryQuestion(prompt, tokens, "full", recompute=True),
    )


def first_questions(prompt: tuple[int, ...], tokens: int) -> tuple[CanaryQuestion, ...]:
    """The first answer, computed again, is the one that all others must equal."""
    none, mixed, full = questions_of_a_round(prompt, tokens)
    return (full, none, mixed)


@dataclass(frozen=True, slots=True)
class RoundResult:
    """The answers of one round, each judged; ``expected`` is the commonest clean answer.

    ``finding`` is ``None`` where this round was learned from.
    """

    expected: tuple[int, ...]
    questions: tuple[CanaryQuestion, ...]
    answers: tuple[CanaryAnswer, ...]
    judged: tuple[Judged, ...]
    finding: Finding | None

    @property
    def differing(self) -> tuple[tuple[CanaryQuestion, CanaryAnswer, Judged], ...]:
        """Answers that rounding does not explain; empty for a round that the baseline learns
        from."""
        if self.finding is None:
            return ()
        all_of = zip(self.questions, self.answers, self.judged, strict=True)
        return tuple(one for one in all_of if one[2].suspect)

    @property
    def sentence(self) -> str:
        """The finding, with the figures of the first difference."""
        if not self.differing:
            ties = sum(one.near_tie for one in self.judged)
            beside = f", {counted(ties, 'near tie')}" if ties else ""
            return f"{len(self.expected)} tokens equal in {_states(self.answers)}{beside}"
        words = []
        for asked, got, found in self.differing:
            how = "computed again" if asked.recompute else f"{got.prefix_hit_tokens} tokens held"
            what = (
                f"token {found.place} of {len(got.positions)} differs"
                if found.place is not None
                else f"log probabilities differ by {found.ratio:.3g} times the noise"
            )
            words.append(f"{what} in {state_of(got.seen)} residency ({how})")
        return "; ".join(words)

    def runs(self) -> list[CanaryRun]:
        """The round for the status document; no tokens."""
        return [
            CanaryRun(
                asked=asked.residency,
                recomputed=asked.recompute,
                equal=self.finding is None or not found.suspect,
                near_tie=found.near_tie,
                distance=found.ratio,
                prefix_hit_tokens=got.prefix_hit_tokens,
                steps_full=got.seen.full,
                steps_mixed=got.seen.mixed,
                steps_none=got.seen.none,
                scheduled_tokens=got.seen.scheduled_tokens,
                step_s=got.seen.step_s,
            )
            for asked, got, found in zip(self.questions, self.answers, self.judged, strict=True)
        ]


def state_of(seen: CanaryReport) -> str:
    """The residency that most of the decode steps were made in."""
    steps = {"full": seen.full, "mixed": seen.mixed, "no": seen.none}
    return max(steps, key=steps.__getitem__)


def _states(answers: Sequence[CanaryAnswer]) -> str:
    states = list(dict.fromkeys(state_of(one.seen) for one in answers))
    words = " and ".join(filter(None, (", ".join(states[:-1]), states[-1])))
    return f"{words} residency"
