"""Compares the rows that attention would read with those that it should; pure."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Reads:
    """One layer's attention of one step.

    ``rows`` uint8 [R, K, row]; cells whose ``valid`` [R, K] is false hold anything. ``counts``
    int32 [R]: the number of cells of a row that attention reads.
    """

    rows: torch.Tensor
    valid: torch.Tensor
    counts: torch.Tensor


def first_difference(found: Reads, right: Reads) -> str | None:
    """Where ``found`` first differs from ``right``, in words; ``None`` where it does not."""
    wrong_cells = found.valid != right.valid
    wrong_bytes = (found.rows != right.rows).any(dim=2) & right.valid & found.valid
    wrong_counts = found.counts != right.counts
    if not bool(wrong_cells.any() | wrong_bytes.any() | wrong_counts.any()):
        return None
    if bool(wrong_cells.any()):
        row, cell = _first(wrong_cells)
        reads = "a position that is not selected" if found.valid[row, cell] else "nothing"
        return f"decode row {row}, cell {cell}: attention would read {reads}"
    if bool(wrong_bytes.any()):
        row, cell = _first(wrong_bytes)
        ours, theirs = found.rows[row, cell], right.rows[row, cell]
        byte = int((ours != theirs).nonzero()[0])
        return (
            f"decode row {row}, cell {cell}: byte {byte} of the row is {int(ours[byte])} and "
            f"should be {int(theirs[byte])}"
        )
    (row,) = _first(wrong_counts)
    return (
        f"decode row {row}: {int(found.counts[row])} cells are counted and "
        f"{int(right.counts[row])} are selected"
    )


def _first(wrong: torch.Tensor) -> tuple[int, ...]:
    return tuple(int(one) for one in wrong.nonzero()[0])
