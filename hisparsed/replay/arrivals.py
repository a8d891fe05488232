"""When sessions start: recorded arrivals, a Poisson process, or the trace's own start times.

Seconds from the start of the replay, in order. Only session starts: calls inside a session follow
the session's own responses.
"""

import csv
import random
from datetime import datetime
from pathlib import Path

from hisparsed.errors import UserError
from hisparsed.replay.records import text_lines

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
