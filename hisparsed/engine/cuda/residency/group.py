"""One index group of the node: a resolver state, the addresses of its layers, and a step's lists.

Takes and gives tensors as vLLM has them. Every tensor that a captured graph may touch is made
before, and stays where it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hisparsed.kernels.api import (
    Geometry,
    Resolution,
    ResolverState,
    RowLayout,
    SlotMoves,
    gather,
    resolve,
)


@dataclass(frozen=True, eq=False)
class LayerRows:
    """Where one layer's rows lie. ``slab`` and ``host`` are flat uint8 views of whole memories.

    ``cache``: the layer's rows in the slab, ``[blocks, block_size, row]`` of any dtype.
    """

    slab: torch.Tensor
    host: torch.Tensor
    cache: torch.Tensor
    layout: RowLayout

    @classmethod
    def of(cls, cache: torch.Tensor, host: torch.Tensor) -> LayerRows:
        """``cache`` strided by blocks over its storage, ``host`` contiguous ``[rows, row]``.

        Raises ``ValueError`` where rows are not contiguous or the two differ in row size.
        """
        block_size, width = cache.shape[1], cache.shape[2]
        row_bytes = width * cache.element_size()
        if cache.stride(2) != 1 or cache.stride(1) != width:
            raise ValueError(f"hot rows must be contiguous within a block, got {cache.stride()}")
        if not host.is_contiguous() or host.shape[1] * host.element_size() != row_bytes:
            raise ValueError(
                f"host rows must be contiguous and of {row_bytes} B as hot rows are, got "
                f"{tuple(host.shape)} {host.dtype}"
            )
        storage = cache.untyped_storage()
        slab = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(storage)
        layout = RowLayout(
            block_size=block_size,
            row_bytes=row_bytes,
            host_block_bytes=block_size * row_bytes,
            slab_block_bytes=cache.stride(0) * cache.element_size(),
            host_offsets=(0,),
            slab_offsets=(cache.data_ptr() - storage.data_ptr(),),
        )
        return cls(slab, host.view(torch.uint8).view(-1), cache, layout)


@dataclass(frozen=True, eq=False)
class StepLists:
    """Lists of one resolve that only its gathers read; groups follow one another, so all share."""

    physical_rows: torch.Tensor
    miss_mask: torch.Tensor
    swap_host: torch.Tensor
    swap_physical: torch.Tensor

    @classmethod
    def create(cls, rows: int, topk: int, device: torch.device) -> StepLists:
        made = Resolution.create(rows, topk, index_dtype=torch.int32, device=device)
        return cls(made.physical_rows, made.miss_mask, made.swap_host, made.swap_physical)


class GroupRows:
    """``layers``: leader first. ``attention_indices`` int32 [R, K], ``valid_counts`` and
    ``swap_counts`` int32 [R] are vLLM's own, which its attention reads.

    ``hot_group``: which hot cache group the layers lie in. ``scratch`` int32: blocks for rows
    that do not fit, enough for a whole step.
    """

    def __init__(
        self,
        state: ResolverState,
        geometry: Geometry,
        layers: Sequence[LayerRows],
        lists: StepLists,
        *,
        attention_indices: torch.Tensor,
        valid_counts: torch.Tensor,
        swap_counts: torch.Tensor,
        hot_group: int,
        scratch: torch.Tensor | None = None,
    ) -> None:
        if not geometry.attention_fits_int32:
            raise ValueError(
                f"{geometry.slab_blocks} GPU blocks with a stride of "
                f"{geometry.attention_block_stride} rows do not fit vLLM's int32 attention "
                "indices; lower gpu_memory_utilization"
            )
        self.state = state
        self.geometry = geometry
        self.layers = tuple(layers)
        self.row_bytes = sum(layer.layout.row_bytes for layer in layers)
        """Bytes that one missed row moves over all layers."""
        self.hot_group = hot_group
        self._scratch = scratch
        self._out = Resolution(
            physical_rows=lists.physical_rows,
            attention_indices=attention_indices,
            valid_counts=valid_counts,
            miss_mask=lists.miss_mask,
            swap_host=lists.swap_host,
            swap_physical=lists.swap_physical,
            swap_counts=swap_counts,
        )

    def release(self) -> None:
        """Let go of the memories: a host pool that is mapped closes only without views of it."""
        self.layers = ()

    def resolve(
        self,
        topk: torch.Tensor,
        request_ids: torch.Tensor,
        state_of_request: torch.Tensor,
        source_table: torch.Tensor,
        resident_table: torch.Tensor,
        hot_table: torch.Tensor,
        rows: slice,
    ) -> Resolution:
        """Fill ``rows`` of the step's lists and of vLLM's tensors; see ``kernels.api.resolve``."""
        return resolve(
            self.state,
            self.geometry,
            topk.contiguous(),
            request_ids,
            state_of_request,
            source_table,
            resident_table,
            hot_table,
            self._scratch,
            out=self._out.part(rows.start, rows.stop),
        )

    def fetch(self, layer: int, rows: slice) -> None:
        """Copy the listed host rows of one layer to where the resolve said."""
        found, of = self._out.part(rows.start, rows.stop), self.layers[layer]
        gather(
            of.host,
            of.slab,
            of.layout,
            found.swap_host,
            found.swap_physical,
            found.swap_counts,
            pinned=True,
        )

    def move(self, moves: SlotMoves, hot_blocks: torch.Tensor) -> None:
        """Carry out slot moves on every layer. ``hot_blocks`` int32 [S, *], by state row."""
        size = self.geometry.block_size
        source, target = (
            (hot_blocks[moves.row, slots // size].long(), slots % size)
            for slots in (moves.source, moves.target)
        )
        for layer in self.layers:
            layer.cache[target] = layer.cache[source]
