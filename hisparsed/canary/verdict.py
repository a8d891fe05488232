"""Judges recorded answers of the canary: rounding, a near tie, or corrupted KV.

Pure functions of recorded answers. An answer is tokens and, at each of its positions, the log
probabilities of the best tokens. Positions of two answers can be compared as long as the tokens
before them are equal: then both have the same context, and only the computation or the rows that
were read differ. So a baseline holds what clean answers gave after each beginning that any of them
had, and an answer that took the other side of a near tie is compared as far as it is known.

*Distance* at a position: the root mean square of the differences of log probabilities. *Noise*
there: the same among the clean answers themselves. Kernels that are not batch-invariant round
differently each time, so an answer is judged by its distance in units of noise, in the mean of its
positions. A token that no rounding explains (its log probability is far below the best one's) is a
finding alone. ``docs/canary.md`` describes what this finds and what it misses.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Position:
    """One token of an answer. ``logprobs``: natural logarithms, of the best tokens there."""

    token: int
    logprobs: Mapping[int, float]


RecordedAnswer = tuple[Position, ...]

LEAST_ROUNDS = 12
"""Clean rounds from which a baseline is learned where kernels round."""
MOST_ANSWERS = 60
"""Most clean answers in a baseline; newer ones replace older ones."""
_LEAST_NOISE = 0.01
"""Natural units. A baseline that was learned on an idle node must not take what a busy node
rounds otherwise for corruption; what kernels of a GPU do was not measured yet."""
_EXACT_NOISE = 1e-5
"""Where the node's arithmetic is exact: what is left are float32 digits of log probabilities."""
_ALIKE = 8.0
"""Positions have their own noise as far as they were seen often: the noise of all counts as
this many answers more at each."""
CERTAIN = 6.0
"""Distance / noise from which one answer alone means corruption."""
SUSPECT = 3.2
"""Distance / noise from which the question is repeated; twice in a row means corruption."""
_GROSS = 1.0
"""Natural units."""
_FLIP = 25.0
"""Rounding did not choose a token whose log probability is this many times the noise below the best
one's."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """Clean answers after one beginning: their number, the mean log probability of each token that
    half of them list, and the noise."""

    count: int
    means: Mapping[int, float]
    noise: float = 0.0


@dataclass(frozen=True)
class Baseline:
    """The properties of clean answers. ``noise`` in natural units."""

    answers: tuple[RecordedAnswer, ...]
    noise: float
    after: Mapping[tuple[int, ...], _Seen]

    @property
    def tokens(self) -> tuple[int, ...]:
        """The commonest answer."""
        tokens: tuple[int, ...] = ()
        while (seen := self.after.get(tokens)) is not None:
            follows = [answer[len(tokens)].token for answer in self._beginning_with(tokens)]
            if not seen.count or not follows:
                break
            tokens = (*tokens, max(sorted(set(follows)), key=follows.count))
        return tokens

    def _beginning_with(self, tokens: tuple[int, ...]) -> list[RecordedAnswer]:
        size = len(tokens)
        return [
            one
            for one in self.answers
            if len(one) > size and tuple(at.token for at in one[:size]) == tokens
        ]


def learn(answers: Sequence[RecordedAnswer], *, exact: bool = False) -> Baseline:
    """From answers of clean rounds, at least one. ``exact``: this node's arithmetic never
    rounds, so any difference is one too many."""
    kept = tuple(answers[-MOST_ANSWERS:])
    listed: dict[tuple[int, ...], list[Mapping[int, float]]] = {}
    for answer in kept:
        tokens: tuple[int, ...] = ()
        for position in answer:
            listed.setdefault(tokens, []).append(position.logprobs)
            tokens = (*tokens, position.token)
    after = {tokens: _means(found) for tokens, found in listed.items()}
    if exact:
        noise, own = _EXACT_NOISE, dict.fromkeys(after, _EXACT_NOISE)
    else:
        noise, own = _noises(after, kept)
    return Baseline(
        kept, noise, {tokens: replace(seen, noise=own[tokens]) for tokens, seen in after.items()}
    )


def _noises(
    after: Mapping[tuple[int, ...], _Seen], answers: Sequence[RecordedAnswer]
) -> tuple[float, dict[tuple[int, ...], float]]:
    """Of all positions together, and after each beginning."""
    found: dict[tuple[int, ...], list[float]] = {}
    for answer in answers:
        for tokens, distance in _distances(after, answer, least=2):
            # A mean leans towards each of the answers that it is of.
            count = after[tokens].count
            found.setdefault(tokens, []).append(distance * math.sqrt(count / (count - 1)))
    noise = max(_LEAST_NOISE, _root_mean_square(one for some in found.values() for one in some))
    own = {
        tokens: math.sqrt(
            (sum(one * one for one in some) + _ALIKE * noise * noise) / (len(some) + _ALIKE)
        )
        for tokens in after
        for some in (found.get(tokens, []),)
    }
    return noise, {tokens: max(_LEAST_NOISE, one) for tokens, one in own.items()}


def _means(listed: Sequence[Mapping[int, float]]) -> _Seen:
    values: dict[int, list[float]] = {}
    for one in listed:
        for token, value in one.items():
            values.setdefault(token, []).append(value)
    # A token at the end of the list is there only when it came out high.
    least = (len(listed) + 1) // 2
    return _Seen(
        len(listed),
        {token: sum(some) / len(some) for token, some in values.items() if len(some) >= least},
    )


def _root_mean_square(values: Iterable[float]) -> float:
    squares = [value * value for value in values]
    return math.sqrt(sum(squares) / len(squares)) if squares else 0.0


def _distances(
    after: Mapping[tuple[int, ...], _Seen], answer: RecordedAnswer, *, least: int = 1
) -> list[tuple[tuple[int, ...], float]]:
    """Beginning and distance at each position whose beginning ``least`` clean answers had."""
    found: list[tuple[tuple[int, ...], float]] = []
    tokens: tuple[int, ...] = ()
    for position in answer:
        seen = after.get(tokens)
        if seen is None or seen.count < least:
            break
        found.append((tokens, _distance(seen.means, position.logprobs)))
        tokens = (*tokens, position.token)
    return found


def _distance(means: Mapping[int, float], listed: Mapping[int, float]) -> float:
    """A token that is no longer listed fell at least to the end of the list."""
    lowest = min(listed.values(), default=0.0)
    return _root_mean_square(
        listed[token] - mean if token in listed else max(0.0, mean - lowest)
        for token, mean in means.items()
    )


def plausible(answers: Sequence[RecordedAnswer]) -> bool:
    """Whether answers could all be clean, before their noise is known: what lies further apart
    than ``_GROSS`` is not rounding on any node."""
    after = learn(answers).after
    return all(
        _root_mean_square(one for _, one in _distances(after, answer)) < _GROSS
        and _first_unlikely(after, answer) is None
        for answer in answers
    )


def _first_unlikely(after: Mapping[tuple[int, ...], _Seen], answer: RecordedAnswer) -> int | None:
    """The first token, from 1, that lay ``_GROSS`` below the best one in the mean."""
    tokens: tuple[int, ...] = ()
    for number, position in enumerate(answer, 1):
        seen = after.get(tokens)
        if seen is None:
            break
        if _gap(seen.means, position.token) > _GROSS:
            return number
        tokens = (*tokens, position.token)
    return None


def _gap(means: Mapping[int, float], token: int) -> float:
    """How far ``token`` lies below the best one; the end of the list where it is not listed."""
    values = means.values()
    return max(values, default=0.0) - means.get(token, min(values, default=0.0))


@dataclass(frozen=True, slots=True)
class Judged:
    """One answer against a baseline. ``ratio``: distance / noise in the mean; ``flip``: how far
    below the best token the first unknown one lay / noise, 0 where every token was known;
    ``place``: of that token, counted from 1, or ``None``."""

    ratio: float
    flip: float
    place: int | None
    compared: int
    tokens: int

    @property
    def certain(self) -> bool:
        return self.ratio >= CERTAIN or self.flip >= _FLIP

    @property
    def suspect(self) -> bool:
        return self.certain or self.ratio >= SUSPECT

    @property
    def near_tie(self) -> bool:
        """It took another token where rounding explains it."""
        return self.place is not None and not self.suspect


def judge_answer(baseline: Baseline, answer: RecordedAnswer) -> Judged:
    """``answer`` of any residency against what clean answers are like."""
    after = baseline.after
    ratios = [one / after[tokens].noise for tokens, one in _distances(after, answer)]
    place, gap = _first_unknown(after, answer)
    return Judged(
        ratio=sum(ratios) / len(ratios) if ratios else 0.0,
        flip=gap / baseline.noise,
        place=place,
        compared=len(ratios),
        tokens=len(answer),
    )


def _first_unknown(
    after: Mapping[tuple[int, ...], _Seen], answer: RecordedAnswer
) -> tuple[int | None, float]:
    """The position where the answer left all known answers, and how far that token is below the
    best."""
    tokens: tuple[int, ...] = ()
    for number, position in enumerate(answer, 1):
        seen = after.get(tokens)
        if seen is None:
            break
        if number < len(answer) and (*tokens, position.token) not in after:
            return number, _gap(seen.means, position.token)
        tokens = (*tokens, position.token)
    return None, 0.0


class Finding(StrEnum):
    CLEAN = "clean"
    SUSPECT = "suspect"
    """Further from the baseline than noise mostly is: ask again before anything is done."""
    CORRUPT = "corrupt"


def judge(baseline: Baseline, *rounds: Sequence[RecordedAnswer]) -> Finding:
    """Of the last round; ``rounds`` are one or two that followed each other, oldest first, with
    the answers to the same questions in the same order.

    A prompt that was computed once with much rounding is read again in the next round, so a
    suspicion counts twice only where it is of the same question.
    """
    *before, last = [[judge_answer(baseline, answer) for answer in one] for one in rounds]
    if any(one.certain for one in last):
        return Finding.CORRUPT
    if not any(one.suspect for one in last):
        return Finding.CLEAN
    again = any(
        one.suspect and other.suspect
        for earlier in before
        for one, other in zip(earlier, last, strict=True)
    )
    return Finding.CORRUPT if again else Finding.SUSPECT
