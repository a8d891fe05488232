"""Copies between GPU and pinned host memory: batches on a stream of their own.

A lane is one stream: its copies run in the order given, beside the model. What is copied is
``ranges``' business, who waits for whom is ``worker``'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from hisparsed.engine.cuda.ranges import Addresses


class Copy(Protocol):
    """One batch under way."""

    def done(self) -> bool: ...

    def wait(self) -> None:
        """Block this thread until it has ended."""

    def seconds(self) -> float:
        """Time on the device, once done."""


class Lane(Protocol):
    """Takes batches; each starts after those before it."""

    def submit(self, source: Addresses, target: Addresses, lengths: Addresses) -> Copy: ...


class CudaCalls:
    """The few calls to CUDA and vLLM that a lane makes, for one device."""

    def __init__(self, device: torch.device) -> None:
        from vllm._custom_ops import swap_blocks_batch

        self._device = device
        self._swap_blocks_batch = swap_blocks_batch

    def new_stream(self) -> Any:
        return torch.cuda.Stream(device=self._device)  # type: ignore[no-untyped-call]

    def compute_stream(self) -> Any:
        return torch.cuda.current_stream(self._device)

    def new_event(self) -> Any:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def copy(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        lengths: torch.Tensor,
        source_is_stable: bool,
    ) -> None:
        """One driver call for the whole batch, on the current stream."""
        self._swap_blocks_batch(source, target, lengths, is_src_access_order_any=source_is_stable)


class CudaCopy:
    """A batch between two events. Keeps its address lists until it is dropped: the driver may
    read them late."""

    def __init__(self, began: Any, ended: Any, lists: Sequence[torch.Tensor]) -> None:
        self._began = began
        self._ended = ended
        self._lists = lists

    def done(self) -> bool:
        return bool(self._ended.query())

    def wait(self) -> None:
        self._ended.synchronize()

    def seconds(self) -> float:
        return float(self._began.elapsed_time(self._ended)) / 1000.0


class CudaLane:
    """``source_is_stable``: no stream writes what is read, so the driver may read it early.

    Every batch waits for what the compute stream has been given so far, and for ``others()``.
    The address lists are ordinary memory: nothing is pinned for a copy.
    """

    def __init__(
        self,
        calls: CudaCalls,
        *,
        source_is_stable: bool,
        others: Callable[[], Sequence[Any]] = tuple,
    ) -> None:
        self._calls = calls
        self._stream = calls.new_stream()
        self._source_is_stable = source_is_stable
        self._others = others

    def submit(self, source: Addresses, target: Addresses, lengths: Addresses) -> Copy:
        self._stream.wait_stream(self._calls.compute_stream())
        for other in self._others():
            self._stream.wait_stream(other)
        began, ended = self._calls.new_event(), self._calls.new_event()
        lists = (torch.from_numpy(source), torch.from_numpy(target), torch.from_numpy(lengths))
        with self._calls.on(self._stream):
            began.record(self._stream)
            if lengths.size:
                self._calls.copy(*lists, self._source_is_stable)
            ended.record(self._stream)
        return CudaCopy(began, ended, lists)
