"""What a recorded trace is, whatever file it came from: sessions of calls over chained blocks.

A block id stands for a block of tokens *and everything before it*: two calls that hold the same id
have the same prompt up to the end of that block. Nothing here is scaled and nothing is text.
"""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockRun:
    """`count` blocks with consecutive ids from `first`."""

    first: int
    count: int


def block_ids(runs: tuple[BlockRun, ...]) -> Iterator[int]:
    """The ids of all blocks, first to last."""
    for run in runs:
        yield from range(run.first, run.first + run.count)


@dataclass(frozen=True, slots=True)
class Call:
    """One recorded request: token counts as recorded, times in seconds.

    `tail_block` is the id of the tokens behind the last full block (`input_tokens` minus the full
    blocks). `think_time_s` is the client's pause between the end of the previous response and this
    call; `api_time_s` is how long the recorded response took, where the trace says.
    """

    blocks: tuple[BlockRun, ...]
    tail_block: int
    input_tokens: int
    output_tokens: int
    think_time_s: float
    api_time_s: float | None


@dataclass(frozen=True, slots=True)
class Session:
    """Calls that follow one another; `start_s` is when the trace started it (0 where unknown)."""

    id: str
    calls: tuple[Call, ...]
    start_s: float


@dataclass(frozen=True, slots=True)
class Trace:
    """All sessions of one file, whose full blocks hold `block_tokens` tokens each."""

    name: str
    block_tokens: int
    sessions: tuple[Session, ...]


class BlockNames:
    """Gives every (name space, local id) a number of its own: ids never meet by accident."""

    _LOCAL_BITS = 40

    def __init__(self) -> None:
        self._spaces: dict[str, int] = {}

    def block(self, space: str, local_id: int) -> int:
        """The global id of `local_id` in `space`; consecutive local ids stay consecutive."""
        number = self._spaces.setdefault(space, len(self._spaces))
        return (number << self._LOCAL_BITS) + local_id
