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
    columns = torch.arange(swap_host.shape[1], device=swap_host.device)
    listed = columns < swap_counts.unsqueeze(1)
    source, target = swap_host[listed], swap_physical[listed]
    if source.numel() == 0:
        return
    for host_offset, slab_offset in zip(layout.host_offsets, layout.slab_offsets, strict=True):
        from_rows = layer_rows(host, layout, host_offset, layout.host_block_bytes)
        to_rows = layer_rows(slab, layout, slab_offset, layout.slab_block_bytes)
        size = layout.block_size
        to_rows[target // size, target % size] = from_rows[source // size, source % size].to(
            slab.device
        )


def copy_rows(
    slab: torch.Tensor, layout: RowLayout, source: torch.Tensor, target: torch.Tensor
) -> None:
    """Copy physical rows within the slab on every layer; sources and targets are disjoint."""
    size = layout.block_size
    for offset in layout.slab_offsets:
        rows = layer_rows(slab, layout, offset, layout.slab_block_bytes)
        rows[target // size, target % size] = rows[source // size, source % size]


def layer_rows(
    memory: torch.Tensor, layout: RowLayout, offset: int, block_bytes: int
) -> torch.Tensor:
    """One layer as uint8 ``[blocks, block_size, row_bytes]``, sharing memory."""
    page_bytes = layout.block_size * layout.row_bytes
    blocks = (memory.numel() - offset - page_bytes) // block_bytes + 1
    return memory.as_strided(
        (max(blocks, 0), layout.block_size, layout.row_bytes),
        (block_bytes, layout.row_bytes, 1),
        memory.storage_offset() + offset,
    )
