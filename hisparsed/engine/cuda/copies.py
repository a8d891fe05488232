"""Copies of indexer chunks between the GPU and the pinned host pool: ranges and lanes.

``ChunkRanges`` turns chunk ids and GPU blocks into byte ranges, by address arithmetic alone.
Ranges are cut at every layer slice of the host pool and wherever indexer pages are not
neighbours in a GPU block. Registrations of pinned memory are checked once, so that no range is in
two of them.

A lane is one CUDA stream: its batches run in the order given, next to the model. Which ranges are
copied, and who waits for whom, is decided in ``offload``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from hisparsed.engine.host.chunks import ChunkLayout

Addresses = NDArray[np.int64]


@dataclass(frozen=True)
class HostSlices:
    """The host pool as this process sees it: ``addresses`` are those of host block 0, a layer
    each; a layer's slices lie one behind the other."""

    addresses: tuple[int, ...]
    slice_bytes: int
    blocks: int

    def layer_range(self, layer: int) -> tuple[int, int]:
        """First address of the layer's slices, and the first behind them."""
        start = self.addresses[layer]
        return start, start + self.slice_bytes * self.blocks


@dataclass(frozen=True)
class DeviceRun:
    """``length`` bytes of every GPU block; block ``b``'s are at ``address + b * block_stride``."""

    address: int
    block_stride: int
    length: int


@dataclass(frozen=True)
class ByteRanges:
    """Three arrays of equal length: GPU address, host address, bytes."""

    device: Addresses
    host: Addresses
    lengths: Addresses

    @property
    def total_bytes(self) -> int:
        return int(self.lengths.sum())


def join_neighbours(runs: Iterable[DeviceRun]) -> tuple[DeviceRun, ...]:
    """The same bytes in the same order, with runs that touch in every block made one."""
    joined: list[DeviceRun] = []
    for run in runs:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.block_stride == run.block_stride
            and last.address + last.length == run.address
        ):
            joined[-1] = DeviceRun(last.address, last.block_stride, last.length + run.length)
        else:
            joined.append(run)
    return tuple(joined)


def require_whole_slices(host: HostSlices, registrations: Sequence[tuple[int, int]]) -> None:
    """Every slice lies inside one registration, given as (address, bytes).

    The driver refuses a copy across two of them. Raises ``ValueError`` with the layer and the
    address.
    """
    ordered = sorted((start, start + size) for start, size in registrations)
    for layer in range(len(host.addresses)):
        position, end = host.layer_range(layer)
        for start, stop in ordered:
            if stop <= position:
                continue
            if start > position:
                break
            if stop >= end:
                position = end
                break
            if (stop - host.addresses[layer]) % host.slice_bytes:
                raise ValueError(
                    f"host pool: the registration that ends at {stop:#x} cuts a slice of layer "
                    f"{layer}; registrations must end between slices of {host.slice_bytes} B"
                )
            position = stop
        if position < end:
            raise ValueError(
                f"host pool: layer {layer} is not registered from {position:#x} to {end:#x}; its "
                "whole range must be pinned before the first copy"
            )


class ChunkRanges:
    """Byte ranges of chunks, for one process. Made once; ``of`` is a few array operations."""

    def __init__(
        self,
        layout: ChunkLayout,
        host: HostSlices,
        runs: Sequence[DeviceRun],
        device_blocks: int,
    ) -> None:
        """``runs`` make up a chunk, in its order. Raises ``ValueError`` where sizes disagree."""
        if (len(host.addresses), host.slice_bytes) != (layout.layers, layout.slice_bytes):
            raise ValueError(
                f"host pool: {len(host.addresses)} layers with slices of {host.slice_bytes} B, "
                f"but chunks are laid out for {layout.layers} of {layout.slice_bytes} B"
            )
        run_bytes = sum(run.length for run in runs)
        if run_bytes != layout.chunk_bytes:
            raise ValueError(
                f"indexer pages of a GPU block take {run_bytes} B, but a chunk is laid out for "
                f"{layout.chunk_bytes} B"
            )
        self._layout = layout
        self._slice_bytes = host.slice_bytes
        self._chunks = host.blocks * layout.chunks_per_block
        self._device_blocks = device_blocks
        cuts = [_cut(layout, slot, host.addresses, runs) for slot in range(layout.chunks_per_block)]
        counts = np.array([len(of_slot) for of_slot in cuts], dtype=np.int64)
        self._counts = counts
        self._first = np.concatenate(([0], np.cumsum(counts)[:-1]))
        self._cuts = np.array([cut for of_slot in cuts for cut in of_slot], dtype=np.int64)

    def of(self, chunk_ids: NDArray[np.integer], device_blocks: NDArray[np.integer]) -> ByteRanges:
        """Ranges of ``chunk_ids[i]`` against GPU block ``device_blocks[i]``, in that order.

        Raises ``ValueError`` for ids that the pools do not have: nothing may be copied then.
        """
        chunks, blocks = chunk_ids.astype(np.int64), device_blocks.astype(np.int64)
        if chunks.shape != blocks.shape:
            raise ValueError(f"{chunks.size} chunks for {blocks.size} GPU blocks; one each")
        _require_below(chunks, self._chunks, "chunk")
        _require_below(blocks, self._device_blocks, "GPU block")
        host_blocks, slots = np.divmod(chunks, self._layout.chunks_per_block)
        counts = self._counts[slots]
        owner = np.repeat(np.arange(chunks.size), counts)
        ends = np.cumsum(counts)
        within = np.arange(owner.size) - np.repeat(ends - counts, counts)
        cuts = self._cuts[self._first[slots][owner] + within]
        return ByteRanges(
            device=cuts[:, 0] + cuts[:, 1] * blocks[owner],
            host=cuts[:, 2] + self._slice_bytes * host_blocks[owner],
            lengths=np.ascontiguousarray(cuts[:, 3]),
        )


def _cut(
    layout: ChunkLayout, slot: int, layer_addresses: Sequence[int], runs: Sequence[DeviceRun]
) -> list[tuple[int, int, int, int]]:
    """(GPU address in block 0, GPU block stride, host address in block 0, length) of a slot."""
    cuts: list[tuple[int, int, int, int]] = []
    pieces = iter(layout.pieces(slot))
    piece = next(pieces)
    done_of_piece = 0
    for run in runs:
        done_of_run = 0
        while done_of_run < run.length:
            if done_of_piece == piece.length:
                piece, done_of_piece = next(pieces), 0
            length = min(run.length - done_of_run, piece.length - done_of_piece)
            host = layer_addresses[piece.layer] + piece.slice_offset + done_of_piece
            cuts.append((run.address + done_of_run, run.block_stride, host, length))
            done_of_run += length
            done_of_piece += length
    return cuts


def _require_below(ids: Addresses, limit: int, what: str) -> None:
    wrong = ids[(ids < 0) | (ids >= limit)]
    if wrong.size:
        raise ValueError(f"{what} {wrong[0]} does not exist; there are 0..{limit - 1}")


class Copy(Protocol):
    """One batch under way."""

    def done(self) -> bool: ...

    def wait(self) -> None:
        """Block this thread until it has ended."""

    def seconds(self) -> float:
        """Time on the device, once done; the last question that may be asked."""


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
    """A batch between two events, which go to ``spare`` in the end. Keeps its address lists until
    it is dropped: the driver may read them late."""

    def __init__(
        self, began: Any, ended: Any, lists: Sequence[torch.Tensor], spare: list[Any]
    ) -> None:
        self._began = began
        self._ended = ended
        self._lists = lists
        self._spare = spare

    def done(self) -> bool:
        return bool(self._ended.query())

    def wait(self) -> None:
        self._ended.synchronize()

    def seconds(self) -> float:
        seconds = float(self._began.elapsed_time(self._ended)) / 1000.0
        self._spare += (self._began, self._ended)
        return seconds


class CudaLane:
    """``source_is_stable``: no stream writes what is read, so the driver may read it early.

    Every batch waits for what the compute stream has been given so far, and for ``others()``.
    The address lists are ordinary memory: nothing is pinned for a copy. Events are used again, as
    making one takes the driver as long as recording many.
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
        self._spare: list[Any] = []

    def _event(self) -> Any:
        return self._spare.pop() if self._spare else self._calls.new_event()

    def submit(self, source: Addresses, target: Addresses, lengths: Addresses) -> Copy:
        self._stream.wait_stream(self._calls.compute_stream())
        for other in self._others():
            self._stream.wait_stream(other)
        began, ended = self._event(), self._event()
        lists = (torch.from_numpy(source), torch.from_numpy(target), torch.from_numpy(lengths))
        with self._calls.on(self._stream):
            began.record(self._stream)
            if lengths.size:
                self._calls.copy(*lists, self._source_is_stable)
            ended.record(self._stream)
        return CudaCopy(began, ended, lists, self._spare)
