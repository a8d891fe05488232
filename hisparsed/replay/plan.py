"""What to replay, decided before the first call: which sessions, how fast, until when.

Pure. Everything random is drawn here from one seed, and `limit_calls` cuts the trace itself, so two
replays of one plan send the same calls whatever the endpoint does.
"""

import random
from dataclasses import dataclass

from hisparsed.errors import UserError
from hisparsed.replay.client import RequestSettings
from hisparsed.replay.prompt import PromptMaker
from hisparsed.replay.scale import ScaledSession, ScaledTrace


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """One replay.

    Without `arrivals_s` it is closed loop: `concurrency` sessions at a time, the next starts when
    one ends. With `arrivals_s` session k starts at that second. `time_scale` multiplies the
    recorded pauses inside sessions; 0 leaves none. `duration_s` cuts calls in flight when it
    is over.
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
    taken = [0] * len(sessions)
    running: list[int] = []
    waiting = list(range(len(sessions) - 1, -1, -1))
    left = most
    while left and (running or waiting):
        while waiting and len(running) < concurrency:
            running.append(waiting.pop())
        for index in running[:left]:
            taken[index] += 1
            left -= 1
        running = [index for index in running if taken[index] < len(sessions[index].calls)]
    return tuple(
        ScaledSession(session.id, session.calls[:count], session.start_s)
        for session, count in zip(sessions, taken, strict=True)
        if count
    )
