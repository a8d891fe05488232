"""The calls that a lane makes to CUDA, in their order; a device is not needed to see them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from hisparsed.engine.cuda.copy import CudaCopy, CudaLane

CALLS = list[Any]


class RecordedStream:
    def __init__(self, name: str, calls: CALLS) -> None:
        self.name, self.calls = name, calls

    def wait_stream(self, other: RecordedStream) -> None:
        self.calls.append((self.name, "waits for", other.name))


class RecordedEvent:
    def __init__(self, calls: CALLS) -> None:
        self.calls = calls

    def record(self, stream: RecordedStream) -> None:
        self.calls.append((stream.name, "event"))


class RecordedCalls:
    """Stands where ``CudaCalls`` is."""

    def __init__(self) -> None:
        self.calls: CALLS = []
        self.compute = RecordedStream("compute", self.calls)

    def new_stream(self) -> RecordedStream:
        return RecordedStream("lane", self.calls)

    def compute_stream(self) -> RecordedStream:
        return self.compute

    def new_event(self) -> RecordedEvent:
        return RecordedEvent(self.calls)

    @contextmanager
    def on(self, stream: RecordedStream) -> Any:
        self.calls.append(("on", stream.name))
        yield
        self.calls.append(("off", stream.name))

    def copy(
        self, source: torch.Tensor, target: torch.Tensor, lengths: torch.Tensor, stable: bool
    ) -> None:
        assert not source.is_pinned()
        self.calls.append((source.tolist(), target.tolist(), lengths.tolist(), stable))


def submit(*, source_is_stable: bool, others: bool, size: int = 2) -> tuple[CALLS, Any]:
    cuda: Any = RecordedCalls()
    mirror = RecordedStream("mirror", cuda.calls)
    lane = CudaLane(
        cuda,
        source_is_stable=source_is_stable,
        others=(lambda: (mirror,)) if others else tuple,
    )
    values = [np.arange(size, dtype=np.int64) + 10 * which for which in range(3)]
    return cuda.calls, lane.submit(*values)


def test_a_copy_waits_for_the_model_and_for_others_and_stands_between_two_events() -> None:
    calls, _ = submit(source_is_stable=False, others=True)
    assert calls == [
        ("lane", "waits for", "compute"),
        ("lane", "waits for", "mirror"),
        ("on", "lane"),
        ("lane", "event"),
        ([0, 1], [10, 11], [20, 21], False),
        ("lane", "event"),
        ("off", "lane"),
    ]


def test_only_a_lane_whose_source_is_stable_lets_the_driver_read_early() -> None:
    calls, _ = submit(source_is_stable=True, others=False)
    assert calls[3][-1] is True


def test_an_empty_batch_is_only_an_event() -> None:
    calls, _ = submit(source_is_stable=True, others=False, size=0)
    assert calls == [
        ("lane", "waits for", "compute"),
        ("on", "lane"),
        ("lane", "event"),
        ("lane", "event"),
        ("off", "lane"),
    ]


def test_a_copy_takes_its_time_from_the_device() -> None:
    class Event:
        def __init__(self, at_ms: float) -> None:
            self.at_ms = at_ms

        def elapsed_time(self, later: Event) -> float:
            return later.at_ms - self.at_ms

    assert CudaCopy(Event(5.0), Event(255.0), ()).seconds() == 0.25
