"""A proof process on the stand-in GPU, for tests: ``python proof_process.py FAULT``.

FAULT is none, or wrong: a byte of a row, and two pieces of chunks changed for each other.
"""

from __future__ import annotations

import sys
from typing import Any

from hisparsed.engine.cuda.proof.__main__ import main


def wrong_row() -> None:
    from hisparsed.engine.cuda.residency.group import GroupRows

    fetch = GroupRows.fetch

    def fetch_wrong(self: Any, layer: int, rows: slice) -> None:
        fetch(self, layer, rows)
        found = self._out.part(rows.start, rows.stop)
        if layer == 1 and found.swap_counts[0]:
            at, size = int(found.swap_physical[0, 0]), self.geometry.block_size
            self.layers[1].cache[at // size, at % size, 7] ^= 1

    GroupRows.fetch = fetch_wrong  # type: ignore[method-assign]


def wrong_chunk() -> None:
    from hisparsed.engine.cuda.copies import CudaCalls

    copy = CudaCalls.copy

    def copy_wrong(self: Any, source: Any, target: Any, lengths: Any, stable: bool) -> None:
        target = target.clone()
        target[[0, 1]] = target[[1, 0]]
        copy(self, source, target, lengths, stable)

    CudaCalls.copy = copy_wrong  # type: ignore[method-assign]


if __name__ == "__main__":
    if sys.argv[1] == "wrong":
        wrong_row()
        wrong_chunk()
    main()
