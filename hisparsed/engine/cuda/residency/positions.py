"""Which positions a step has written, from the host slots that vLLM says it has written.

vLLM keys hot rows by host slot, our resolver by the request's own position. Torch only, of fixed
shape, nothing read back.
"""

from __future__ import annotations

import torch


def written_positions(
    slots: torch.Tensor,
    request_ids: torch.Tensor,
    source_table: torch.Tensor,
    block_size: int,
) -> torch.Tensor:
    """Position of each written token, int64 [T]; -1 where it is not known.

    ``slots`` int64 [T]: host rows written, -1 none; ``request_ids`` int32 [T]: batch row of each,
    ascending, -1 for padding at the end; ``source_table`` int32 [N, pages]. Tokens of a request
    follow one another in position, so only the first one's page is looked up. Columns behind a
    request's last block may hold anything: its own blocks come first.
    """
    rows = torch.arange(source_table.shape[0], device=slots.device, dtype=request_ids.dtype)
    real = request_ids >= 0
    # Padding has no place in an ascending order; it goes behind everything.
    ordered = torch.where(real, request_ids, source_table.shape[0])
    first = torch.searchsorted(ordered, rows).clamp(max=slots.shape[0] - 1)
    first_slot = slots[first]
    page_of = torch.where(first_slot < block_size, -1, first_slot // block_size)
    found = source_table == page_of.unsqueeze(1)
    page = found.int().argmax(dim=1)
    start = torch.where(found.any(dim=1), page * block_size + first_slot % block_size, -1)
    request = request_ids.clamp(min=0).long()
    index = torch.arange(slots.shape[0], device=slots.device)
    position = start[request] + index - first[request]
    known = real & (slots >= 0) & (start[request] >= 0)
    return torch.where(known, position, -1)
