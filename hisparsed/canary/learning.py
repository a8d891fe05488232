"""What the canary remembers of its answers: learns a baseline first, judges by it afterwards.

Nothing may be frozen before ``LEAST_ROUNDS`` clean rounds where kernels round, because the noise is
not known. Where the node's arithmetic is exact the first answer is the baseline. Later clean
rounds are learned from too, so that a baseline of an idle node comes to know a busy one. One
prompt and answer length; another one needs another memory.
"""

from __future__ import annotations

from hisparsed.canary.round import (
    CanaryAnswer,
    CanaryQuestion,
    RoundResult,
    first_questions,
    questions_of_a_round,
)
from hisparsed.canary.verdict import (
    LEAST_ROUNDS,
    MOST_ANSWERS,
    Baseline,
    Finding,
    RecordedAnswer,
    judge,
    judge_answer,
    learn,
    plausible,
)


class CanaryMemory:
    """``exact``: whether the node's arithmetic never rounds."""

    def __init__(self, prompt: tuple[int, ...], tokens: int, *, exact: bool) -> None:
        self.prompt = prompt
        self.tokens = tokens
        self._exact = exact
        self._learned: list[RecordedAnswer] = []
        self.clean_rounds = 0
        self.baseline: Baseline | None = None
        self._suspect: tuple[RecordedAnswer, ...] | None = None
        """The last round, where it was not clean."""
        self._unsure = False

    @property
    def wants_more(self) -> bool:
        """Whether the next round should come soon: to learn, or to distinguish a suspicion from
        noise.
        """
        return self.baseline is None or self._unsure

    def questions(self) -> tuple[CanaryQuestion, ...]:
        if self._learned:
            return questions_of_a_round(self.prompt, self.tokens)
        return first_questions(self.prompt, self.tokens)

    def take(
        self, questions: tuple[CanaryQuestion, ...], answers: tuple[CanaryAnswer, ...]
    ) -> RoundResult:
        """Judge the answers of one round, or learn from them."""
        positions = tuple(answer.positions for answer in answers)
        if self.baseline is not None:
            finding: Finding | None = self._judge(self.baseline, positions)
            by = self.baseline
        elif self._exact:
            by = learn(positions[:1], exact=True)
            finding = judge(by, positions)
            if finding is Finding.CLEAN:
                self._learned, self.baseline, self.clean_rounds = [positions[0]], by, 1
        else:
            finding, by = self._learn(positions)
        judged = tuple(judge_answer(by, one) for one in positions)
        return RoundResult(by.tokens, questions, answers, judged, finding)

    def _judge(self, baseline: Baseline, positions: tuple[RecordedAnswer, ...]) -> Finding:
        before = (self._suspect,) if self._suspect is not None else ()
        finding = judge(baseline, *before, positions)
        self._suspect = None if finding is Finding.CLEAN else positions
        self._unsure = finding is Finding.SUSPECT
        if finding is Finding.CLEAN and not self._exact:
            self._add(positions)
            self.baseline = learn(self._learned)
        return finding

    def _learn(self, positions: tuple[RecordedAnswer, ...]) -> tuple[Finding | None, Baseline]:
        if not plausible([*self._learned, *positions]):
            # There is no way to know which of them was right.
            by = learn(self._learned or positions)
            self._learned, self.clean_rounds = [], 0
            return Finding.SUSPECT, by
        self._add(positions)
        by = learn(self._learned)
        if self.clean_rounds >= LEAST_ROUNDS:
            self.baseline = by
        return None, by

    def _add(self, positions: tuple[RecordedAnswer, ...]) -> None:
        self._learned = [*self._learned, *positions][-MOST_ANSWERS:]
        self.clean_rounds += 1
