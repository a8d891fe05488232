"""Row copies in torch operations: host to slab for a swap list, and slab to slab for moves.

Byte copies only; which rows is decided elsewhere. One list of rows serves every layer.
"""

from __future__ import annotations

import torch

from hisparsed.kernels.geometry import RowLayout
from hisparsed.kernels.refusals import swap_count_outside, swap_row_outside


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
    width = swap_host.shape[1]
    wrong = ((swap_counts < 0) | (swap_counts > width)).nonzero()
    if wrong.numel():
        row = int(wrong[0, 0])
        raise swap_count_outside(row, int(swap_counts[row]), width)
    columns = torch.arange(width, device=swap_host.device)
    listed = columns < swap_counts.unsqueeze(1)
    source, target = swap_host[listed], swap_physical[listed]
    if source.numel() == 0:
        return
    _check_rows(source, target, layout.host_rows(host.numel()), layout.slab_rows(slab.numel()))
    for host_offset, slab_offset in zip(layout.host_offsets, layout.slab_offsets, strict=True):
        from_rows = _host_rows(host, layout, host_offset)
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


def _check_rows(source: torch.Tensor, target: torch.Tensor, host_rows: int, slab_rows: int) -> None:
    outside = (source < 0) | (source >= host_rows) | (target < 0) | (target >= slab_rows)
    if bool(outside.any()):
        first = int(outside.nonzero()[0, 0])
        raise swap_row_outside(int(source[first]), int(target[first]), host_rows, slab_rows)


def _host_rows(host: torch.Tensor, layout: RowLayout, offset: int) -> torch.Tensor:
    blocks = layout.host_rows(host.numel()) // layout.block_size
    return _layer_rows(host, layout, offset, blocks, layout.host_block_bytes)


def _slab_rows(slab: torch.Tensor, layout: RowLayout, offset: int) -> torch.Tensor:
    blocks = layout.slab_rows(slab.numel()) // layout.block_size
    return _layer_rows(slab, layout, offset, blocks, layout.slab_block_bytes)


def _layer_rows(
    memory: torch.Tensor, layout: RowLayout, offset: int, blocks: int, block_bytes: int
) -> torch.Tensor:
    """One layer as uint8 ``[blocks, block_size, row_bytes]``, sharing memory."""
    return memory.as_strided(
        (blocks, layout.block_size, layout.row_bytes),
        (block_bytes, layout.row_bytes, 1),
        memory.storage_offset() + offset,
    )
