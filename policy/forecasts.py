"""Expected and measured results of moves, and the error between them.

The laws state expectations, ``expectation`` judges them, and journal, API, simulation and TUI show
them. Pure data and arithmetic; decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from hisparsed.policy.signals import Lever

Setting: TypeAlias = int | float | str
"""Host blocks, a multiplier, GPU blocks, or the name of an order; each lever has its own."""


class Figure(StrEnum):
    """Figures that a move is expected to change; the unit ends the name."""

    REACH = "reach_tokens"
    """Added to the smaller reach."""
    SAVED = "saved_tokens_per_minute"
    """Prefix tokens served beyond those before the move."""
    SERVED = "served_tokens_per_minute"
    """Prefix tokens served after the move."""
    LOADED = "loaded_bytes_per_s"
    """Rows read from the host after the move."""
    FREED = "freed_gpu_blocks"
    """Given back by hot buffers; negative where they take more."""

    @property
    def less_is_better(self) -> bool:
        return self is Figure.LOADED


Figures: TypeAlias = Mapping[Figure, float]

MOST_ERROR = 10.0
"""Upper limit of an error: where next to nothing was expected, its size means nothing."""
OFF_BY = 0.5
"""A prediction with a larger error is wrong; half, as hit rates are noisy."""


def error_of(expected: float, came: float) -> float:
    """Distance from what was expected, as a share of it; at most ``MOST_ERROR``."""
    if expected == came:
        return 0.0
    return min(MOST_ERROR, abs(came - expected) / abs(expected)) if expected else MOST_ERROR


def falls_short(figure: Figure, expected: float, came: float) -> bool:
    """Whether ``came`` is worse than expected by more than ``OFF_BY``."""
    worse = came - expected if figure.less_is_better else expected - came
    return worse > OFF_BY * abs(expected)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The verdict on a move, at the load that it was made for where load changes the figure."""

    age_s: float
    """Since the move, or the last step of a way that is judged as one."""
    current: Setting
    wanted: Setting
    window_s: float
    """Time over which ``came`` was measured."""
    expected: Figures
    came: Figures = field(default_factory=dict)
    """``expected`` has the same figures."""

    @property
    def errors(self) -> dict[Figure, float]:
        return {name: error_of(self.expected[name], self.came[name]) for name in self.expected}

    @property
    def short(self) -> bool:
        """Whether any figure falls short."""
        return any(falls_short(name, self.expected[name], self.came[name]) for name in self.came)


@dataclass(frozen=True, slots=True)
class ErrorShare:
    """Errors of one lever's predictions of one figure, ascending."""

    lever: Lever
    figure: Figure
    errors: tuple[float, ...]

    @property
    def text(self) -> str:
        """The number of moves, and p50 and p90 of their errors."""
        half, most = (quantile(self.errors, at) for at in (0.5, 0.9))
        figure = self.figure.replace("_", " ")
        moves = f"{len(self.errors)} move{'' if len(self.errors) == 1 else 's'}"
        return f"{self.lever}, {figure}: {moves}, off by {half:.0%} (p50) and {most:.0%} (p90)"


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value at ``share`` of ascending values."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def error_shares(verdicts: Iterable[tuple[Lever, Mapping[Figure, float]]]) -> list[ErrorShare]:
    """By lever and figure, in their order, from the errors of single moves."""
    found: dict[tuple[Lever, Figure], list[float]] = {}
    for lever, errors in verdicts:
        for figure, error in errors.items():
            found.setdefault((lever, figure), []).append(error)
    return [
        ErrorShare(lever, figure, tuple(sorted(found[lever, figure])))
        for lever in Lever
        for figure in Figure
        if (lever, figure) in found
    ]
