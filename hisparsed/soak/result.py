"""What a soak found, as figures and as one JSON object. Plain values only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


def percentile(values: Sequence[float], share: float) -> float | None:
    """The nearest-rank percentile of ``values``, ``share`` from 0 to 1; ``None`` of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def rounded(value: float | None, digits: int = 1) -> float | None:
    """For reading; ``None`` stays."""
    return None if value is None else round(value, digits)


@dataclass(frozen=True)
class SoakResult:
    """Counts of one soak, and the time that the engine thread worked for steps and moves.

    ``requests`` were answered. ``violations`` are of the host ledger, or memory that was not
    free when all calls had ended. ``stuck`` calls made no progress, or failed. The ITL figures
    leave out what only a soak does (checks, proofs).
    """

    seed: int
    seconds: float
    steps: int
    requests: int
    verified: int
    token_differences: int
    violations: int
    stuck: int
    moves: int
    moves_refused: int
    resets: int
    resets_refused: int
    cancels: int
    reconnects: int
    preemptions: int
    stalls_found: int
    residency_seen: tuple[str, ...]
    pending_seen: int
    draining_seen: int
    given_back_blocks: int
    prefix_hit_tokens: int
    reports: int
    move_us_p50: float | None
    move_us_p99: float | None
    move_us_max: float | None
    report_us_p50: float | None
    itl_ms_p50_with_moves: float | None
    itl_ms_p50_without: float | None
    itl_ms_p99_with_moves: float | None
    itl_ms_p99_without: float | None
    itl_p99_ratio: float | None
    interrupted: bool
    record: str | None
    """Where the record of a soak that was not clean is."""

    @property
    def clean(self) -> bool:
        return not (self.violations or self.token_differences or self.stuck)

    def to_dict(self) -> dict[str, Any]:
        """All fields, ready for JSON."""
        return asdict(self)

    def to_text(self) -> str:
        """A few lines for a person."""
        state = "clean" if self.clean else "NOT CLEAN"
        lines = [
            f"{state}: {self.requests:,} calls answered, {self.verified:,} of them verified, "
            f"{self.moves:,} moves in {self.steps:,} steps and {self.seconds:,.0f} s (seed "
            f"{self.seed}).",
            f"{self.violations} violations, {self.token_differences} token differences, "
            f"{self.stuck} stuck.",
            f"A move took the engine thread {_us(self.move_us_p50)} at the median, "
            f"{_us(self.move_us_p99)} at p99; a report {_us(self.report_us_p50)}.",
        ]
        if self.itl_p99_ratio is not None:
            lines.append(
                f"Time between tokens, p99: {self.itl_ms_p99_with_moves:g} ms with moves, "
                f"{self.itl_ms_p99_without:g} ms without."
            )
        lines.append(
            f"On the way: {self.cancels:,} cancels, {self.reconnects:,} reconnects, "
            f"{self.resets} cache resets, {self.preemptions:,} preemptions, residency "
            f"{', '.join(self.residency_seen) or 'none seen'}."
        )
        if self.record is not None:
            lines.append(f"What happened is in {self.record}.")
        return "\n".join(lines)


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f} us"
