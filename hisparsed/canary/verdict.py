"""What the answers of one round say: equal or not, and in which residency each was given. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hisparsed.canary.question import Answer, Question
from hisparsed.control.status import CanaryRun
from hisparsed.engine.messages import CanaryReport


@dataclass(frozen=True, slots=True)
class Verdict:
    """``expected`` tokens against those of each question of the round."""

    expected: tuple[int, ...]
    questions: tuple[Question, ...]
    answers: tuple[Answer, ...]

    @property
    def differing(self) -> tuple[tuple[Question, Answer], ...]:
        pairs = zip(self.questions, self.answers, strict=True)
        return tuple((asked, got) for asked, got in pairs if got.tokens != self.expected)

    @property
    def sentence(self) -> str:
        """What was found, with the figures of the first difference."""
        if not self.differing:
            return f"{len(self.expected)} tokens equal in {_states(self.answers)}"
        words = []
        for asked, got in self.differing:
            place = first_difference(self.expected, got.tokens)
            how = "computed anew" if asked.recompute else f"{got.prefix_hit_tokens} tokens held"
            words.append(
                f"token {place} of {len(self.expected)} differs in {state_of(got.seen)} residency "
                f"({how})"
            )
        return "; ".join(words)

    def runs(self) -> list[CanaryRun]:
        """The round for the status document; no tokens."""
        return [
            CanaryRun(
                asked=asked.residency,
                recomputed=asked.recompute,
                equal=got.tokens == self.expected,
                prefix_hit_tokens=got.prefix_hit_tokens,
                steps_full=got.seen.full,
                steps_mixed=got.seen.mixed,
                steps_none=got.seen.none,
                scheduled_tokens=got.seen.scheduled_tokens,
                step_s=got.seen.step_s,
            )
            for asked, got in zip(self.questions, self.answers, strict=True)
        ]


def first_difference(expected: Sequence[int], got: Sequence[int]) -> int:
    """The first token, counted from 1, that differs; the shorter one's end counts as one."""
    pairs = zip(expected, got, strict=False)
    same = next((at for at, (one, other) in enumerate(pairs) if one != other), None)
    return 1 + (min(len(expected), len(got)) if same is None else same)


def state_of(seen: CanaryReport) -> str:
    """The residency that most of the decode steps were made in."""
    steps = {"full": seen.full, "mixed": seen.mixed, "no": seen.none}
    return max(steps, key=steps.__getitem__)


def _states(answers: Sequence[Answer]) -> str:
    states = list(dict.fromkeys(state_of(one.seen) for one in answers))
    words = " and ".join(filter(None, (", ".join(states[:-1]), states[-1])))
    return f"{words} residency"
