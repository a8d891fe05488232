"""Which part of the traffic a part of the node serves, and how like the whole it is.

A part of recorded chat is whole families (``replay/families.py``); users play whole sessions. Both
keep what calls share, so a cache that loses nothing must find about as much in the part as in the
whole traffic of the same time. Imports no vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

from pydantic import BaseModel, ConfigDict

from hisparsed.simulate.scenario import Scenario, Traffic
from hisparsed.simulate.workload import ClosedLoop, Mixed, OpenLoop, Players

SEEN_TOLERANCE = 0.03
"""A part whose share of blocks seen before is further from that of the whole is warned of."""
RATE_TOLERANCE = 0.05
"""And one whose tokens are further from its share of them."""


def players_of(scenario: Scenario, seed: int) -> Players:
    """Of the node's part."""
    parts = [
        _players(scenario, one, number, scenario.scale, seed)
        for number, one in enumerate(scenario.traffic)
    ]
    return parts[0] if len(parts) == 1 else Mixed(parts)


def _players(
    scenario: Scenario, one: Traffic, number: int, share: Fraction, seed: int
) -> ClosedLoop | OpenLoop:
    until_s = min(one.until_s, scenario.duration_s)
    name = f"{number}/" if len(scenario.traffic) > 1 else ""
    if one.users is None:
        return OpenLoop(
            one.sessions,
            seed,
            load=one.load,
            share=share,
            from_s=one.from_s,
            until_s=until_s,
            name=name,
        )
    return ClosedLoop(
        one.sessions,
        max(1, round(one.users * share)),
        seed,
        ramp_s=scenario.warmup_s / 2,
        from_s=one.from_s,
        until_s=until_s,
        name=name,
    )


class Sample(BaseModel):
    """One trace of a scenario; shares are of the blocks of all prompts sent in its time."""

    model_config = ConfigDict(frozen=True)

    trace: str
    users: int | None
    """Of the whole node; ``None`` for recorded chat."""
    load: float | None
    whole_seen: float
    """Share seen before, of the traffic of the whole node: what a cache that loses nothing
    finds."""
    part_seen: float
    """The same of the part, mean of the seeds."""
    part_rate: float | None
    """Tokens of the part / its share of those of the whole, mean of the seeds; ``None`` for users,
    whose number is exact."""

    @property
    def differs(self) -> bool:
        rate = 1.0 if self.part_rate is None else self.part_rate
        return (
            abs(self.part_seen - self.whole_seen) > SEEN_TOLERANCE
            or abs(rate - 1.0) > RATE_TOLERANCE
        )

    @property
    def text(self) -> str:
        """One sentence, with a warning where the part differs."""
        pace = f", {self.users} users" if self.users is not None else f" x{self.load:g}"
        rate = "" if self.part_rate is None else f" and {self.part_rate:.0%} of its share of tokens"
        warning = (
            f" Warning: they differ by more than {SEEN_TOLERANCE * 100:g} points, or by "
            f"{RATE_TOLERANCE:.0%} of the tokens; use a larger --scale or more --seeds."
        )
        return (
            f"{self.trace}{pace}: {self.whole_seen:.1%} of the prompt blocks were seen before, "
            f"{self.part_seen:.1%} in the part that is simulated{rate}."
            f"{warning if self.differs else ''}"
        )


def samples_of(scenarios: Sequence[Scenario], seeds: Sequence[int]) -> list[Sample]:
    """Of every trace of every scenario."""
    return [sample for scenario in scenarios for sample in _samples(scenario, seeds)]


def _samples(scenario: Scenario, seeds: Sequence[int]) -> Iterator[Sample]:
    for number, one in enumerate(scenario.traffic):
        whole_share = one.sessions.share if one.users is None else Fraction(1)
        pairs = [
            [
                _players(scenario, one, number, share, seed).demand()
                for share in (whole_share, scenario.scale)
            ]
            for seed in seeds
        ]
        smaller = float(scenario.scale / whole_share)
        rates = [part.tokens / whole.tokens / smaller for whole, part in pairs]
        yield Sample(
            trace=one.sessions.name,
            users=one.users,
            load=one.load if one.users is None else None,
            whole_seen=sum(whole.seen_share for whole, _ in pairs) / len(pairs),
            part_seen=sum(part.seen_share for _, part in pairs) / len(pairs),
            part_rate=sum(rates) / len(rates) if one.users is None else None,
        )
