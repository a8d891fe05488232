"""The result of one resolve call: where attention reads, and which rows must be copied first.

Preallocated tensors that are written in place every step. Holds nothing between steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_LAYOUT: dict[str, tuple[tuple[torch.dtype, ...], int]] = {
    "physical_rows": ((torch.int64,), 2),
    "attention_indices": ((torch.int32, torch.int64), 2),
    "valid_counts": ((torch.int32,), 1),
    "miss_mask": ((torch.bool,), 2),
    "swap_host": ((torch.int64,), 2),
    "swap_physical": ((torch.int64,), 2),
    "swap_counts": ((torch.int32,), 1),
}
"""Dtypes and dimensions: [R, K] or [R]."""


@dataclass(frozen=True)
class Resolution:
    """Outputs for up to ``R`` rows of ``K`` top-k positions. Build with ``create``.

    Raises ``ValueError`` unless the tensors are as described, contiguous and on one device: the
    backends write to their addresses. That is checked once, here, and not in every step.
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

    def __post_init__(self) -> None:
        if self.physical_rows.dim() != 2:
            raise ValueError(f"physical_rows must be 2-D, got {self.physical_rows.dim()}-D")
        rows, topk = self.physical_rows.shape
        for name, (dtypes, dim) in _LAYOUT.items():
            tensor: torch.Tensor = getattr(self, name)
            expected = (rows, topk)[:dim]
            if tensor.dtype not in dtypes:
                raise ValueError(
                    f"{name} must be {' or '.join(map(str, dtypes))}, got {tensor.dtype}"
                )
            if tensor.shape != expected or not tensor.is_contiguous():
                raise ValueError(
                    f"{name} must be contiguous with shape {expected}, got shape "
                    f"{tuple(tensor.shape)} and strides {tensor.stride()}"
                )
            if tensor.device != self.physical_rows.device:
                raise ValueError(
                    f"{name} is on {tensor.device}, physical_rows on {self.physical_rows.device}"
                )

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
        part = object.__new__(Resolution)  # leading rows of what was checked are as it was
        vars(part).update((name, whole[start:stop]) for name, whole in vars(self).items())
        return part
