"""What to replay, decided before the first call: which sessions, when they start, until when.

Also reads the values that operators type: scales, durations, token ranges, files of arrivals.
Arrivals are seconds from the start of the replay, in order; calls inside a session follow the
session's own responses. Everything random is drawn here from one seed, and `limit_calls` cuts the
trace itself, so two replays of one plan send the same calls whatever the endpoint does.
"""

import csv
import random
import re
from collections import Counter
from dataclasses import dataclass
from datetime import datetime
from fractions import Fraction
from itertools import chain, islice
from pathlib import Path

from hisparsed.errors import UserError
from hisparsed.replay.client import RequestSettings
from hisparsed.replay.scaled_trace import (
    PromptMaker,
    ScaledSession,
    ScaledTrace,
    TokenRange,
    equal_pace,
)
from hisparsed.replay.trace import text_lines

_SECONDS_PER = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_scale(text: str) -> Fraction:
    """`1/16`, `0.25` or `2`."""
    match = re.fullmatch(r"\d{1,9}(?:\.\d{1,9}|/0*[1-9]\d{0,8})?", text.strip())
    factor = Fraction(match[0]) if match else Fraction(0)
    if factor <= 0:
        raise UserError(
            f"--scale: {text!r} is not right; need a number above 0 such as 1/16 or 0.25"
        )
    return factor


def parse_duration_s(option: str, text: str) -> float:
    """`500ms`, `60s`, `5m` or `1h`, in seconds, above 0."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h)\s*", text)
    seconds = float(match[1]) * _SECONDS_PER[match[2]] if match else 0.0
    if seconds <= 0:
        raise UserError(f"{option}: {text!r} is not right; need a duration such as 60s, 5m or 1h")
    return seconds


def parse_token_range(text: str) -> TokenRange:
    """`LOW:HIGH`: ids from LOW to below HIGH."""
    match = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text.strip())
    if not match:
        raise UserError(f"--token-range: {text!r} is not right; need LOW:HIGH such as 32:127")
    return TokenRange(int(match[1]), int(match[2]))


_COLUMN = "TIMESTAMP"


def recorded_arrivals(path: Path) -> tuple[float, ...]:
    """Arrivals of a CSV (gzip or plain) with a TIMESTAMP column, the first at 0 s.

    Raises UserError naming file and line for a missing column or a value that is not a time.
    """
    numbered = list(text_lines(path))
    header = next(csv.reader([numbered[0][1]]))
    if _COLUMN not in header:
        raise UserError(
            f"{path}: line 1: the columns are {', '.join(header):.80}; need a column {_COLUMN}"
        )
    column = header.index(_COLUMN)
    times: list[float] = []
    for number, text in numbered[1:]:
        row = next(csv.reader([text]))
        times.append(_instant(row[column] if column < len(row) else "", path, number))
    if not times:
        raise UserError(f"{path}: no arrivals after the header; at least one line is needed")
    first = min(times)
    return tuple(sorted(at - first for at in times))


def _instant(value: str, path: Path, line: int) -> float:
    try:
        # Seconds come with seven decimals; datetime takes six.
        return datetime.fromisoformat(f"{value[:26]}+00:00").timestamp()
    except ValueError as error:
        right = "a time such as 2023-11-16 18:15:46.6805900"
        raise UserError(f"{path}: line {line}: {_COLUMN}: found {value!r}; need {right}") from error


def poisson_arrivals(count: int, rate_per_s: float, seed: int) -> tuple[float, ...]:
    """`count` arrivals at `rate_per_s` sessions a second on average, the first at 0 s."""
    draw = random.Random(seed)
    arrivals = [0.0]
    while len(arrivals) < count:
        arrivals.append(arrivals[-1] + draw.expovariate(rate_per_s))
    return tuple(arrivals)


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """One replay.

    Without `arrivals_s` it is closed loop: `concurrency` sessions at a time, the next starts when
    one ends. With `arrivals_s` session k starts at that second. `time_scale` multiplies the
    recorded pauses inside sessions; 0 leaves none. after `duration_s` calls in flight are cut.
    """

    url: str
    request: RequestSettings
    prompts: PromptMaker
    sessions: tuple[ScaledSession, ...]
    concurrency: int = 8
    arrivals_s: tuple[float, ...] | None = None
    time_scale: float = 0.0
    duration_s: float | None = None
    api_key: str | None = None
    clipped: int = 0
    dropped: int = 0

    def __post_init__(self) -> None:
        if not self.sessions:
            raise UserError(
                "replay: no call is left to send; use a smaller --scale or a larger --max-model-len"
            )
        if self.concurrency < 1:
            raise UserError(f"--concurrency: {self.concurrency} is not right; need 1 or more")
        if not 0 <= self.time_scale < float("inf"):
            raise UserError(f"--time-scale: {self.time_scale} is not right; need 0 or more")
        if self.arrivals_s is not None and not self.arrivals_s:
            raise UserError("--arrivals: there are none; at least one is needed")

    @property
    def calls(self) -> int:
        """How many calls the plan sends if nothing stops it."""
        return sum(len(session.calls) for session in self.planned_sessions)

    @property
    def planned_sessions(self) -> tuple[ScaledSession, ...]:
        """The sessions that get to start: with fewer arrivals than sessions, the first ones."""
        if self.arrivals_s is None:
            return self.sessions
        return self.sessions[: len(self.arrivals_s)]


def choose_sessions(trace: ScaledTrace, count: int | None, seed: int) -> tuple[ScaledSession, ...]:
    """`count` sessions drawn by `seed` and kept in file order; all of them for None."""
    if count is None:
        return trace.sessions
    if not 1 <= count <= len(trace.sessions):
        raise UserError(
            f"--sessions: {count} is not right; the trace has {len(trace.sessions)} to choose from"
        )
    chosen = sorted(random.Random(seed).sample(range(len(trace.sessions)), count))
    return tuple(trace.sessions[index] for index in chosen)


def limit_calls(
    sessions: tuple[ScaledSession, ...], concurrency: int, most: int
) -> tuple[ScaledSession, ...]:
    """The first `most` calls that `concurrency` sessions make when all calls take equally long."""
    calls = chain.from_iterable(equal_pace(sessions, concurrency))
    taken = Counter(place for place, _ in islice(calls, most))
    return tuple(
        ScaledSession(session.id, session.calls[:count], session.start_s)
        for session, count in ((session, taken[place]) for place, session in enumerate(sessions))
        if count
    )
