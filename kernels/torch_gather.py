"""Row copies in torch operations: host to slab for a swap list, and slab to slab for moves.

Byte copies only; which rows is decided elsewhere. One list of rows serves every layer.
"""

from __future__ import annotations

import torch

from hisparsed.kernels.geometry import RowLayout


def gather(
    host: torch.Tensor,
    slab: torch.Tensor,
    layout: RowLayout,
    swap_host: torch.Tensor,
    swap_physical: torch.Tensor,
    swap_counts: torch.Tensor,
) -> None:
    """See ``hisparsed.kernels.api.gather``; arguments are checked there."""
    size = layout.block_size
    columns = torch.arange(swap_host.shape[1], device=swap_host.device)
    listed = columns < swap_counts.unsqueeze(1)
    source, target = swap_host[listed], swap_physical[listed]
    if source.numel() == 0:
        return
    for host_offset, slab_offset in zip(layout.host_offsets, layout.slab_offsets, strict=True):
        from_rows = _layer_rows(
            host, layout, host_offset, max(layout.host_offsets), layout.host_block_bytes
        )
        to_rows = _slab_rows(slab, layout, slab_offset)
        to_rows[target // size, target % size] = from_rows[source // size, source % size].to(
            slab.device
        )


def copy_rows(
    slab: torch.Tensor, layout: RowLayout, source: torch.Tensor, target: torch.Tensor
) -> None:
    """Copy physical rows within the slab on every layer; sources and targets are disjoint."""
    size = layout.block_size
    for offset in layout.slab_offsets:
        rows = _slab_rows(slab, layout, offset)
        rows[target // size, target % size] = rows[source // size, source % size]


def _slab_rows(slab: torch.Tensor, layout: RowLayout, offset: int) -> torch.Tensor:
    return _layer_rows(slab, layout, offset, max(layout.slab_offsets), layout.slab_block_bytes)


def _layer_rows(
    memory: torch.Tensor, layout: RowLayout, offset: int, last_offset: int, block_bytes: int
) -> torch.Tensor:
    """One layer as uint8 ``[blocks, block_size, row_bytes]``, sharing memory.

    As many blocks as fit for the layer that starts last, so that a row outside the memory
    fails on the first layer, before anything is copied.
    """
    page_bytes = layout.block_size * layout.row_bytes
    blocks = (memory.numel() - last_offset - page_bytes) // block_bytes + 1
    return memory.as_strided(
        (max(blocks, 0), layout.block_size, layout.row_bytes),
        (block_bytes, layout.row_bytes, 1),
        memory.storage_offset() + offset,
    )
