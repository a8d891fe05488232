"""All hot buffers of one worker: leases before a step, shrinking between steps, figures.

The scheduler's message of a step names new requests and those whose hot blocks have changed
since the last message. Sizes are absolute, so a message means the same whatever came before it.
``SentLeases`` is the scheduler's side, ``KnownLeases`` the worker's.

``WorkerResidency`` works on the tensors it was given and on the device's current stream, which
is the one that vLLM computes on. vLLM keys hot rows by host slot, our resolver by the request's
own position; ``written_positions`` translates, with fixed shapes and nothing read back. Imports
no vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hisparsed.engine.cuda.residency.figures import Snapshots, figures
from hisparsed.engine.cuda.residency.group import GroupRows
from hisparsed.engine.worker_report import DISTINCT
from hisparsed.kernels.api import StateBank, shrink_rows

Blocks = tuple[int, ...]
"""Hot blocks that a request holds, one number a hot group."""


@dataclass(frozen=True)
class Lease:
    """``fresh``: the request has just got its state row, and nothing of it is there."""

    request_id: str
    fresh: bool
    blocks: Blocks


@dataclass(frozen=True)
class LeaseUpdates:
    """The changes before one step."""

    leases: tuple[Lease, ...] = ()
    ended: tuple[str, ...] = ()


class SentLeases:
    """The scheduler's side."""

    def __init__(self) -> None:
        self._sent: dict[str, Blocks] = {}

    def updates(
        self,
        scheduled: Iterable[str],
        *,
        fresh: Iterable[str],
        ended: Iterable[str],
        held: Callable[[str], Blocks],
    ) -> LeaseUpdates:
        """The message of a step. ``held``: the number of blocks that each request has now.

        ``ended`` are requests that left the workers' tables: finished or preempted.
        """
        gone = tuple(ended)
        for request_id in gone:
            self._sent.pop(request_id, None)
        new = frozenset(fresh)
        leases = []
        for request_id in scheduled:
            blocks = held(request_id)
            if request_id in new or self._sent.get(request_id) != blocks:
                leases.append(Lease(request_id, request_id in new, blocks))
                self._sent[request_id] = blocks
        return LeaseUpdates(tuple(leases), gone)


class KnownLeases:
    """The worker's side: what its resolver knows."""

    def __init__(self) -> None:
        self.blocks: dict[str, Blocks] = {}

    def take(self, updates: LeaseUpdates) -> None:
        """Raises ``RuntimeError`` when a running request would shrink: its rows have not moved."""
        for request_id in updates.ended:
            self.blocks.pop(request_id, None)
        for lease in updates.leases:
            known = self.blocks.get(lease.request_id)
            if known is not None and not lease.fresh:
                shrinks = [
                    now for before, now in zip(known, lease.blocks, strict=True) if now < before
                ]
                if shrinks:
                    raise RuntimeError(
                        f"request {lease.request_id} has {lease.blocks} hot blocks after {known}, "
                        "but its rows were not moved; a lease shrinks by resize_hot only"
                    )
            self.blocks[lease.request_id] = lease.blocks

    def shrunk(self, request_id: str, blocks: int) -> None:
        """Rows have moved below ``blocks`` hot blocks of each group."""
        known = self.blocks[request_id]
        self.blocks[request_id] = tuple(min(held, blocks) for held in known)


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
        updates: LeaseUpdates,
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
        self.bank.begin_step()
        self._known.take(updates)
        if not updates.leases:
            return
        if state_indices is None:
            raise RuntimeError("leases changed in a step without requests")
        batch_row = {request_id: row for row, request_id in enumerate(request_ids)}
        for fresh, change in ((True, self.bank.begin), (False, self.bank.grow)):
            leases = [lease for lease in updates.leases if lease.fresh is fresh]
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

        ``slots`` int64 [T] host rows and ``request_ids`` int32 [T] batch rows, as vLLM gives them
        to each of its groups; ``state_indices`` int32 [N] on the device.
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
        """Shrink hot buffers to this many blocks of each group; returns rows moved.

        ``row_of``: state row of each request; who is not in it has ended. ``hot_tables``: by hot
        group, int32 [S, *] by state row, still with the blocks that go back. Waits for the
        device, so that the rows have moved when the blocks are returned.
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
        """Why no further step may be served; empty without an error."""
        return self._failed

    def release(self) -> None:
        """Let go of KV and host memory before they are closed; no further step is served."""
        self.doubt("this worker has been shut down")
        for group in self.groups:
            group.release()

    def forget_all(self) -> None:
        """Drop every hot copy, as after a graph capture."""
        self.bank.forget_all()
