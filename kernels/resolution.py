"""What one resolve call says: where attention reads, and which rows must be copied first.

Preallocated tensors that are written in place every step. Holds nothing between steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Resolution:
    """Outputs for up to ``R`` rows of ``K`` top-k positions. Build with ``create``.

    The swap list of a request is packed back to back over the cells of its rows, in ascending
    position: row ``r`` holds entries ``[r, :swap_counts[r]]``, cells beyond are undefined.
    """

    physical_rows: torch.Tensor
    """int64 [R, K]: ``block * block_size + offset``, -1 where nothing may be read."""
    attention_indices: torch.Tensor
    """int32 or int64 [R, K]: ``block * attention_block_stride + offset``, or -1."""
    valid_counts: torch.Tensor
    """int32 [R]: entries of the row that are not -1."""
    miss_mask: torch.Tensor
    """bool [R, K]: the entry reads a row that this step's swap list loads."""
    swap_host: torch.Tensor
    """int64 [R, K]: host rows to copy from."""
    swap_physical: torch.Tensor
    """int64 [R, K]: physical rows to copy to."""
    swap_counts: torch.Tensor
    """int32 [R]."""

    @classmethod
    def create(
        cls,
        rows: int,
        topk: int,
        *,
        index_dtype: torch.dtype = torch.int64,
        device: torch.device | str = "cpu",
    ) -> Resolution:
        """``index_dtype`` is that of ``attention_indices``: int32 or int64."""
        if index_dtype not in (torch.int32, torch.int64):
            raise ValueError(f"index_dtype must be int32 or int64, got {index_dtype}")

        def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            physical_rows=empty(torch.int64, rows, topk),
            attention_indices=empty(index_dtype, rows, topk),
            valid_counts=empty(torch.int32, rows),
            miss_mask=empty(torch.bool, rows, topk),
            swap_host=empty(torch.int64, rows, topk),
            swap_physical=empty(torch.int64, rows, topk),
            swap_counts=empty(torch.int32, rows),
        )

    @property
    def rows(self) -> int:
        return self.physical_rows.shape[0]

    @property
    def topk(self) -> int:
        return self.physical_rows.shape[1]

    def first(self, rows: int) -> Resolution:
        """The first ``rows`` rows, sharing memory; for steps smaller than the allocation."""
        return self if rows == self.rows else self.part(0, rows)

    def part(self, start: int, stop: int) -> Resolution:
        """Rows ``[start, stop)``, sharing memory; for steps resolved in several calls."""
        if not 0 <= start <= stop <= self.rows:
            raise ValueError(f"rows {start} to {stop} do not fit outputs made for {self.rows}")
        return Resolution(
            physical_rows=self.physical_rows[start:stop],
            attention_indices=self.attention_indices[start:stop],
            valid_counts=self.valid_counts[start:stop],
            miss_mask=self.miss_mask[start:stop],
            swap_host=self.swap_host[start:stop],
            swap_physical=self.swap_physical[start:stop],
            swap_counts=self.swap_counts[start:stop],
        )
