"""All hot buffers of one worker: told of leases before a step, shrunk between steps, counted.

Works on the tensors it was given and on the device's current stream, which is the one that vLLM
computes on. Knows no vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hisparsed.engine.cuda.residency.figures import figures
from hisparsed.engine.cuda.residency.group import GroupRows
from hisparsed.engine.cuda.residency.leases import KnownLeases, Lease, LeaseNews
from hisparsed.engine.cuda.residency.positions import written_positions
from hisparsed.engine.cuda.residency.snapshot import Snapshots
from hisparsed.engine.request_curves import DISTINCT
from hisparsed.kernels.api import StateBank, shrink_rows


class WorkerResidency:
    """``groups``: one a state of ``bank``. ``block_size``: rows of a block, everywhere."""

    def __init__(self, bank: StateBank, groups: Sequence[GroupRows], block_size: int) -> None:
        self.bank = bank
        self.groups = tuple(groups)
        self._block_size = block_size
        self._known = KnownLeases()
        self._begun = torch.zeros(
            (bank.groups, bank.num_states + 1, 2), dtype=torch.int64, device=bank.device
        )
        self._snapshots = Snapshots(bank, self._begun)
        self._figures: dict[str, Any] | None = None
        self._written = False
        self._failed = ""

    # --- steps ------------------------------------------------------------------------

    def before_forward(
        self,
        news: LeaseNews,
        request_ids: Sequence[str],
        state_indices: torch.Tensor | None,
    ) -> None:
        """Bring owners and capacities up to date; waits for nothing.

        ``request_ids`` by batch row, ``state_indices`` [N] their state rows on the device.
        Raises ``RuntimeError`` where a wrong row may have been served, which must end the engine.
        """
        if self._failed:
            raise RuntimeError(f"hot buffers are in doubt: {self._failed}")
        self._written = False
        self._known.take(news)
        if not news.leases:
            return
        if state_indices is None:
            raise RuntimeError("leases changed in a step without requests")
        batch_row = {request_id: row for row, request_id in enumerate(request_ids)}
        for fresh, change in ((True, self.bank.begin), (False, self.bank.grow)):
            leases = [lease for lease in news.leases if lease.fresh is fresh]
            if not leases:
                continue
            at = self._on_device([batch_row[one.request_id] for one in leases], torch.int64)
            rows = state_indices[at].long()
            change(rows, self._capacities(leases))
            self._count_anew(rows)

    def _capacities(self, leases: Sequence[Lease]) -> torch.Tensor:
        """int32 [G, n]."""
        rows = [
            [lease.blocks[group.hot_group] * self._block_size for lease in leases]
            for group in self.groups
        ]
        return self._on_device(rows, torch.int32)

    def _count_anew(self, rows: torch.Tensor) -> None:
        """Curves of these state rows begin here."""
        step = self.bank.arrays["step"].index_select(1, rows).long()
        counters = self.bank.arrays["counters"].index_select(1, rows)
        distinct = torch.stack([counters[..., column] for column in DISTINCT]).sum(dim=0)
        self._begun.index_copy_(1, rows, torch.stack((step, distinct), dim=-1))

    def _on_device(self, values: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
        device = self.bank.device
        made = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
        return made.to(device, non_blocking=True)

    def written(
        self,
        slots: torch.Tensor,
        request_ids: torch.Tensor,
        state_indices: torch.Tensor,
        source_table: torch.Tensor,
    ) -> None:
        """Forget hot copies of what this step wrote; all groups at once, at the first call.

        ``slots`` int64 [T] host rows and ``request_ids`` int32 [T] batch rows, as vLLM tells
        each of its groups; ``state_indices`` int32 [N] on the device.
        """
        if self._written:
            return
        self._written = True
        positions = written_positions(slots, request_ids, source_table, self._block_size)
        rows = torch.where(
            request_ids >= 0, state_indices[request_ids.clamp(min=0).long()].long(), -1
        )
        self.bank.forget(rows, positions)

    # --- between steps ----------------------------------------------------------------

    def resize(
        self,
        leases: Mapping[str, int],
        row_of: Mapping[str, int],
        hot_tables: Sequence[torch.Tensor],
    ) -> int:
        """Shrink hot buffers to so many blocks of each group; returns rows moved.

        ``row_of``: state row of each request; who is not in it has ended. ``hot_tables``: by hot
        group, int32 [S, *] by state row, still with the blocks that go back. Waits for the
        device, so that whoever returns blocks knows that their rows have moved.
        """
        asked = {name: blocks for name, blocks in leases.items() if name in row_of}
        if not asked:
            return 0
        least = min(asked.values())
        if least < 1:
            raise ValueError(f"a hot lease is at least one block, got {least}")
        rows = self._on_device([row_of[name] for name in asked], torch.int64)
        capacities = [blocks * self._block_size for blocks in asked.values()]
        moves = shrink_rows(self.bank, rows, self._on_device(capacities, torch.int32))
        moved = 0
        for group, of_group in zip(self.groups, moves, strict=True):
            group.move(of_group, hot_tables[group.hot_group])
            moved += of_group.row.shape[0]
        self._count_anew(rows)
        for name, blocks in asked.items():
            self._known.shrunk(name, blocks)
        if self.bank.device.type == "cuda":
            torch.cuda.current_stream(self.bank.device).synchronize()
        return moved

    def report(self, row_of: Mapping[str, int]) -> dict[str, Any] | None:
        """The newest figures that are there; ``None`` before the first. See ``figures``."""
        taken = self._snapshots.take()
        if taken is not None:
            if taken.error is not None:
                self.doubt(str(taken.error))
            known = {name: row for name, row in row_of.items() if name in self._known.blocks}
            self._figures = figures(taken, known, [group.row_bytes for group in self.groups])
            dropped = self._figures["counters"]["dropped"]
            if dropped:
                self.doubt(f"{dropped} selected rows had no place in a step")
        return self._figures

    def doubt(self, reason: str) -> None:
        """Let no further step be served: a wrong row might be. The first reason stays."""
        self._failed = self._failed or reason

    @property
    def failed(self) -> str:
        """Why no further step may be served; empty while all is well."""
        return self._failed

    def release(self) -> None:
        """Let go of KV and host memory before they are closed; no further step is served."""
        self.doubt("this worker has been shut down")
        for group in self.groups:
            group.release()

    def forget_all(self) -> None:
        """Drop every hot copy, as after a graph capture."""
        self.bank.forget_all()
