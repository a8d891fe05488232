"""What happened to each call, and whether two replays of one plan got the same tokens.

Plain values only: measuring is the client's work, percentiles are `summary`'s.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

CallKey = tuple[str, int]
StopReason = Literal["end_of_trace", "time_up", "interrupted", "endpoint_lost"]


@dataclass(frozen=True, slots=True)
class CallResult:
    """One call, answered or failed. Times in seconds, `started_s` from the start of the replay.

    `ttft_s` and `seconds` count from the first attempt, so waiting after a 429 is part of them.
    `itl_s` are the gaps between two pieces of the stream that carry tokens. `error` is None or a
    kind such as `http_400`, `timeout`, `connect`, `broken_stream`. `digest` stands for the output:
    of token ids where the endpoint returns them, else of the text (`digest_of`).
    """

    session_id: str
    call_index: int
    error: str | None
    detail: str
    started_s: float
    seconds: float
    ttft_s: float | None
    itl_s: tuple[float, ...]
    prompt_tokens: int
    completion_tokens: int
    prefix_hit_tokens: int | None
    retries: int
    retry_wait_s: float
    digest: str
    digest_of: Literal["tokens", "text"]

    @property
    def key(self) -> CallKey:
        """(session id, index of the call in the recorded session)."""
        return self.session_id, self.call_index

    def to_dict(self) -> dict[str, Any]:
        """All fields, ready for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """All calls of one replay in the order they ended.

    `unfinished` calls were in flight when the replay stopped. `preemptions` is what the endpoint's
    own counter grew by, None where it has none.
    """

    calls: tuple[CallResult, ...]
    seconds: float
    stopped_by: StopReason
    unfinished: int
    clipped: int
    dropped: int
    preemptions: int | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Outputs of two replays: `compared` calls ended well in both, `differing` of them differ.

    `not_comparable` calls have token ids in one replay and only text in the other.
    """

    compared: int
    differing: tuple[CallKey, ...]
    not_comparable: tuple[CallKey, ...]
    only_in_a: int
    only_in_b: int


def compare(a: Iterable[CallResult], b: Iterable[CallResult]) -> Comparison:
    """Compare two replays by session and call index; failed calls are left out."""
    answered_a = {call.key: call for call in a if call.error is None}
    answered_b = {call.key: call for call in b if call.error is None}
    both = [key for key in answered_a if key in answered_b]
    unlike = [key for key in both if answered_a[key].digest_of != answered_b[key].digest_of]
    alike = [key for key in both if answered_a[key].digest_of == answered_b[key].digest_of]
    return Comparison(
        compared=len(alike),
        differing=tuple(key for key in alike if answered_a[key].digest != answered_b[key].digest),
        not_comparable=tuple(unlike),
        only_in_a=len(answered_a) - len(both),
        only_in_b=len(answered_b) - len(both),
    )
