"""The counts of a soak while it runs, and its result as figures and as one JSON object."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hisparsed.policy.signals import EngineReport
from hisparsed.soak.settings import SoakSettings


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

    ``requests`` were answered. ``violations`` are of the host ledger, or memory that was not free
    when all calls had ended. ``stuck`` calls made no progress, or failed. The ITL figures exclude
    the work that only a soak does (checks, proofs).
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


@dataclass
class SoakTotals:
    """``busy_s`` is the time that the engine thread worked; moves and reports are in us of it."""

    steps: int = 0
    requests: int = 0
    moves: int = 0
    moves_refused: int = 0
    resets: int = 0
    resets_refused: int = 0
    stuck: int = 0
    token_differences: int = 0
    reports: int = 0
    prefix_hit_tokens: int = 0
    busy_s: float = 0.0
    violations: list[str] = field(default_factory=list)
    residency: set[str] = field(default_factory=set)
    pending_seen: int = 0
    draining_seen: int = 0
    move_us: list[float] = field(default_factory=list)
    report_us: list[float] = field(default_factory=list)
    gaps_moving_s: list[float] = field(default_factory=list)
    gaps_quiet_s: list[float] = field(default_factory=list)
    last: EngineReport | None = None

    def take(self, report: EngineReport, took_us: float) -> None:
        """Note what a report shows."""
        self.reports += 1
        self.last = report
        self.report_us.append(took_us)
        requests = report.requests
        for name in ("full", "mixed", "none"):
            if getattr(requests, name):
                self.residency.add(name)
        self.pending_seen += report.pending_blocks > 0
        self.draining_seen += report.draining_blocks > 0

    def result(
        self,
        settings: SoakSettings,
        *,
        seconds: float,
        verified: int,
        cancels: int,
        reconnects: int,
        interrupted: bool,
        record: str | None,
    ) -> SoakResult:
        moving, quiet = self.gaps_moving_s, self.gaps_quiet_s
        moving_p99, quiet_p99 = percentile(moving, 0.99), percentile(quiet, 0.99)
        ratio = moving_p99 / quiet_p99 if moving_p99 is not None and quiet_p99 else None
        requests = self.last.requests if self.last is not None else None
        return SoakResult(
            seed=settings.seed,
            seconds=round(seconds, 1),
            steps=self.steps,
            requests=self.requests,
            verified=verified,
            token_differences=self.token_differences,
            violations=len(self.violations),
            stuck=self.stuck,
            moves=self.moves,
            moves_refused=self.moves_refused,
            resets=self.resets,
            resets_refused=self.resets_refused,
            cancels=cancels,
            reconnects=reconnects,
            preemptions=requests.preemptions_total if requests else 0,
            stalls_found=requests.stalls_total if requests else 0,
            residency_seen=tuple(n for n in ("full", "mixed", "none") if n in self.residency),
            pending_seen=self.pending_seen,
            draining_seen=self.draining_seen,
            given_back_blocks=self.last.ledger.given_back_blocks_total if self.last else 0,
            prefix_hit_tokens=self.prefix_hit_tokens,
            reports=self.reports,
            move_us_p50=rounded(percentile(self.move_us, 0.5)),
            move_us_p99=rounded(percentile(self.move_us, 0.99)),
            move_us_max=rounded(max(self.move_us, default=None)),
            report_us_p50=rounded(percentile(self.report_us, 0.5)),
            itl_ms_p50_with_moves=_ms(percentile(moving, 0.5)),
            itl_ms_p50_without=_ms(percentile(quiet, 0.5)),
            itl_ms_p99_with_moves=_ms(moving_p99),
            itl_ms_p99_without=_ms(quiet_p99),
            itl_p99_ratio=rounded(ratio, 3),
            interrupted=interrupted,
            record=record,
        )


def _ms(seconds: float | None) -> float | None:
    return rounded(None if seconds is None else seconds * 1000, 2)


def silent(_: SoakTotals) -> None:
    """Shows nothing."""
