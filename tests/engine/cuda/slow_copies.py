"""Stands where CUDA streams are: copies that run when the test says so, on real memory.

Bytes are read and written when a copy runs, not when it is submitted, so what is not ordered by
a wait goes wrong here as it would on a device.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hisparsed.engine.cuda.ranges import Addresses


@dataclass
class Stream:
    """Work in order. An entry is (number, what to do)."""

    queued: deque[tuple[int, Callable[[], None]]] = field(default_factory=deque)
    given: int = 0
    ran: int = 0

    def give(self, work: Callable[[], None]) -> int:
        self.given += 1
        self.queued.append((self.given, work))
        return self.given

    def run_one(self) -> None:
        number, work = self.queued.popleft()
        work()
        self.ran = number

    def run_up_to(self, number: int) -> None:
        while self.ran < number:
            self.run_one()


@dataclass
class SlowCopy:
    stream: Stream
    number: int

    def done(self) -> bool:
        return self.stream.ran >= self.number

    def wait(self) -> None:
        self.stream.run_up_to(self.number)

    def seconds(self) -> float:
        return 0.001


@dataclass
class SlowLane:
    """A lane that waits for ``others`` as they are at submission, as ``CudaLane`` does."""

    stream: Stream
    others: Sequence[Stream] = ()
    batches: list[tuple[Addresses, Addresses, Addresses]] = field(default_factory=list)

    def submit(self, source: Addresses, target: Addresses, lengths: Addresses) -> SlowCopy:
        self.batches.append((source, target, lengths))
        waits = [(other, other.given) for other in self.others]

        def work() -> None:
            for other, number in waits:
                other.run_up_to(number)
            for start, end, length in zip(source, target, lengths, strict=True):
                ctypes.memmove(int(end), int(start), int(length))

        return SlowCopy(self.stream, self.stream.give(work))


def one_stream_lane() -> SlowLane:
    return SlowLane(Stream())
