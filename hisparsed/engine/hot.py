"""Hot buffers with a size per request: the multiplier as a live lever.

Stock vLLM leases the same number of blocks to every request and compares lengths, so the size
cannot change under running requests. Here each request has its own agreed size: that in force when
it first asked, grown later while the GPU pool has room, shrunk when the node's workers have moved
the rows that stay. ``HotShares`` applies multiplier and individual leases to vLLM's hot managers,
the same for all index groups, and reports them. The policy decides the sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.v1.core.single_type_kv_cache_manager import HiSparseHotManager

from hisparsed.engine.worker_report import RowCurve, WorkerReport
from hisparsed.policy.decisions import EngineCommand
from hisparsed.policy.signals import HotBuffers, LeasePoint, MissPoint, RequestHot


class LeasedHotManager(HiSparseHotManager):  # type: ignore[misc]
    """A hot manager with an agreed lease size per request.

    ``blocks_per_request`` stays the upper bound that vLLM sized its tables for. ``grow_headroom``:
    GPU blocks that growing leaves free; ``None`` grows no running request.
    """

    def start_leases(self, blocks: int, *, hot_groups: int, grow_headroom: int | None) -> None:
        self.lease_blocks: dict[str, int] = {}
        self._own_targets: dict[str, int] = {}
        self._hot_groups = hot_groups
        self._grow_headroom = grow_headroom
        self._planned_growth: dict[str, int] = {}
        self.next_lease_blocks = min(blocks, self.blocks_per_request)

    def set_next_lease(self, blocks: int) -> int:
        """Blocks for leases from now on, bounded by the configured maximum."""
        if blocks < 1:
            raise ValueError(f"a hot lease is at least one block, got {blocks}")
        bounded: int = min(blocks, self.blocks_per_request)
        self.next_lease_blocks = bounded
        return bounded

    def set_targets(self, blocks: Mapping[str, int]) -> None:
        """Lease sizes for single requests that have a lease; requests not named keep their size.

        ``shrink`` returns the blocks of leases above their target; smaller leases grow.
        """
        for request_id, own in blocks.items():
            if request_id in self.lease_blocks:
                self._own_targets[request_id] = min(own, self.blocks_per_request)

    def forget_targets(self) -> None:
        """Give all requests the multiplier's lease."""
        self._own_targets.clear()

    def individual_leases(self) -> int:
        """Requests whose target is not the multiplier's."""
        shared: int = self.next_lease_blocks
        return sum(own != shared for own in self._own_targets.values())

    def target_of(self, request_id: str) -> int:
        """Blocks that the request should have."""
        target: int = self._own_targets.get(request_id, self.next_lease_blocks)
        return target

    def lease_of(self, request_id: str) -> int:
        lease: int = self.lease_blocks.get(request_id, self.next_lease_blocks)
        return lease

    def require_hot(self, request_id: str) -> None:
        self.lease_blocks.setdefault(request_id, self.next_lease_blocks)
        super().require_hot(request_id)

    def has_hot(self, request_id: str) -> bool:
        held = len(self.req_to_blocks.get(request_id, ()))
        return held > 0 and held == self.lease_of(request_id)

    def get_num_blocks_to_allocate(self, request_id: str, *args: Any, **kwargs: Any) -> int:
        needed = int(super().get_num_blocks_to_allocate(request_id, *args, **kwargs))
        if needed or self._grow_headroom is None or not self.has_hot(request_id):
            self._planned_growth.pop(request_id, None)
            return needed
        # All hot groups plan before any allocates, so each takes its part of the free blocks.
        room = (self.block_pool.get_num_free_blocks() - self._grow_headroom) // self._hot_groups
        growth: int = max(0, min(self.target_of(request_id) - self.lease_of(request_id), room))
        self._planned_growth[request_id] = growth
        return growth

    def get_num_required_blocks(self, request_id: str) -> int:
        held = len(self.req_to_blocks.get(request_id, ()))
        return max(self.lease_of(request_id) - held, 0)

    def plans(self, request_id: str) -> bool:
        """Whether the next allocation grows the lease."""
        return bool(self._planned_growth.get(request_id))

    def needs_nothing(self, request_id: str) -> bool:
        """Whether the next allocation changes nothing."""
        if request_id not in self.num_cached_block:
            return False
        if request_id not in self.hot_required:
            return True
        return not self.plans(request_id) and self.get_num_required_blocks(request_id) == 0

    def shrink(self, request_id: str, blocks: int) -> None:
        """Return the blocks of a request beyond ``blocks``; its rows must have moved before."""
        if self.lease_blocks.get(request_id, 0) <= blocks:
            return
        self.lease_blocks[request_id] = blocks
        held = self.req_to_blocks.get(request_id, [])
        surplus = held[blocks:]
        if surplus:
            del held[blocks:]
            self.block_pool.free_blocks(reversed(surplus))

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[Any]:
        # Cold admissions can bypass add_local_computed_blocks.
        self.num_cached_block[request_id] = 0
        if request_id not in self.hot_required:
            return []
        growth = self._planned_growth.pop(request_id, 0)
        if growth:
            self.lease_blocks[request_id] = self.lease_of(request_id) + growth
        missing = self.get_num_required_blocks(request_id)
        if missing == 0:
            return []
        blocks: list[Any] = self.block_pool.get_new_blocks(missing)
        self.req_to_blocks[request_id].extend(blocks)
        return blocks

    def pop_blocks_for_free(self, request_id: str) -> list[Any]:
        self.lease_blocks.pop(request_id, None)
        self._own_targets.pop(request_id, None)
        self._planned_growth.pop(request_id, None)
        blocks: list[Any] = super().pop_blocks_for_free(request_id)
        return blocks


ResizeHot = Callable[[dict[str, int]], None]
"""Shrinks the hot buffers of requests to a number of blocks per group, rows moved first."""

MAX_REQUESTS = 256
_POINTS_ABOVE = 4
"""Estimates above the lease that a curve reports; a report of many requests stays small."""


@dataclass(frozen=True)
class HotUnits:
    """The meaning of hot blocks on a node. ``least_rows``: of a legal lease.

    A multiplier is hot rows / top-k, however many rows of a request a step decodes.
    """

    topk: int
    block_tokens: int
    least_rows: int

    def blocks(self, multiplier: float) -> int:
        rows = multiplier * self.topk
        return max(1, math.ceil(rows / self.block_tokens - 1e-9))

    def multiplier(self, blocks: int) -> float:
        return blocks * self.block_tokens / self.topk

    @property
    def least_blocks(self) -> int:
        return -(-self.least_rows // self.block_tokens)


class HotShares:
    """``managers``: one an index group, started; they agree on every lease.

    ``live``: whether the node's kernels accept leases of different sizes.
    """

    def __init__(
        self, managers: Sequence[LeasedHotManager], units: HotUnits, *, live: bool = True
    ) -> None:
        self._managers = managers
        self._live = live
        self._first = managers[0]
        self._units = units
        self.multiplier = units.multiplier(self._first.next_lease_blocks)
        self._curves: Mapping[str, RowCurve] = {}
        self._points: dict[str, tuple[LeasePoint, ...]] = {}

    @property
    def lease_blocks(self) -> int:
        """Blocks of one group that the next lease takes."""
        lease: int = self._first.next_lease_blocks
        return lease

    @property
    def blocks_a_request(self) -> int:
        """Blocks of all groups that the next lease takes."""
        return sum(manager.next_lease_blocks for manager in self._managers)

    # --- commands ---------------------------------------------------------------------

    def require_possible(self, command: EngineCommand, resize_hot: ResizeHot | None) -> None:
        """Raises ``ValueError`` naming what is wrong; changes nothing."""
        units, lease = self._units, self.lease_blocks
        if not self._live and (command.hot_leases or self._changes(command.multiplier)):
            raise ValueError(
                f"the kernels of this node know one hot lease, {lease} blocks or "
                f"{self.multiplier:g}x top-k; another one needs a restart"
            )
        if command.multiplier is not None:
            least = units.least_rows / units.topk
            if command.multiplier < least:
                raise ValueError(
                    f"multiplier {command.multiplier} is below {units.least_rows} hot rows, "
                    f"the least that serves every step of this node; give at least {least:g}"
                )
            lease = min(units.blocks(command.multiplier), self._first.blocks_per_request)
        if not command.hot_leases:
            return
        if resize_hot is None:
            raise ValueError(
                "hot_leases: the workers of this node cannot move rows between hot blocks of "
                "running requests; share evenly"
            )
        most = self._first.blocks_per_request
        for request_id, blocks in command.hot_leases.items():
            if not units.least_blocks <= blocks <= most:
                raise ValueError(
                    f"hot_leases: {blocks} blocks for request {request_id}; a lease on this node "
                    f"has {units.least_blocks} to {most} blocks of each group"
                )
        total, budget = sum(command.hot_leases.values()), lease * len(command.hot_leases)
        if total > budget:
            raise ValueError(
                f"hot_leases: {total} blocks for {len(command.hot_leases)} requests, more than the "
                f"{budget} that the multiplier gives them ({lease} each)"
            )

    def _changes(self, multiplier: float | None) -> bool:
        return multiplier is not None and self._units.blocks(multiplier) != self.lease_blocks

    def apply(self, command: EngineCommand, resize_hot: ResizeHot | None) -> None:
        """Apply multiplier and leases of a checked command.

        A new multiplier ends individual leases, because they divided the old one.
        """
        if command.multiplier is None and command.hot_leases is None:
            return
        for manager in self._managers:
            if command.multiplier is not None:
                manager.set_next_lease(self._units.blocks(command.multiplier))
            if command.multiplier is not None or command.hot_leases == {}:
                manager.forget_targets()
            if command.hot_leases:
                manager.set_targets(command.hot_leases)
        self.multiplier = self._units.multiplier(self.lease_blocks)
        if resize_hot is not None:
            self._shrink(resize_hot)

    def _shrink(self, resize_hot: ResizeHot) -> None:
        wider = {
            request_id: manager.target_of(request_id)
            for manager in self._managers
            for request_id, held in manager.lease_blocks.items()
            if held > manager.target_of(request_id)
        }
        if not wider:
            return
        # The rows that stay move first; only then may other requests use the old blocks.
        resize_hot(wider)
        for manager in self._managers:
            for request_id, blocks in wider.items():
                manager.shrink(request_id, blocks)

    # --- report -----------------------------------------------------------------------

    def figures(self, workers: WorkerReport) -> HotBuffers:
        """``workers`` is what the node's workers counted."""
        counted, first, topk = workers.counters, self._first, self._units.topk
        leased = [manager.req_to_blocks for manager in self._managers]
        return HotBuffers(
            multiplier=self.multiplier,
            references_total=counted["references"],
            hits_total=counted["hits"],
            loads_total=counted["loads"],
            resident_total=counted["resident"],
            h2d_bytes_total=counted["h2d_bytes"],
            predicted=tuple(
                MissPoint(rows / topk, misses)
                for rows, misses in workers.miss_curve
                if rows >= self._units.least_rows
            ),
            counted=workers.counted,
            individual_leases=first.individual_leases(),
            lease_blocks=self.lease_blocks,
            leased_requests=len(first.lease_blocks),
            leased_blocks=sum(len(blocks) for table in leased for blocks in table.values()),
            spills_total=counted["spills"],
            dropped_total=counted["dropped"],
        )

    def of_requests(self, workers: WorkerReport) -> tuple[RequestHot, ...]:
        """The largest leases first; empty where requests cannot be sized one by one."""
        curves = workers.request_curves
        if curves is None:
            return ()
        if curves is not self._curves:
            self._curves, self._points = curves, {}
        held = {
            request_id: len(blocks)
            for request_id, blocks in self._first.req_to_blocks.items()
            if blocks
        }
        largest = sorted(held, key=lambda request_id: (-held[request_id], request_id))
        return tuple(
            RequestHot(
                request_id=request_id,
                lease_blocks=held[request_id],
                target_blocks=self._first.target_of(request_id),
                curve=self._points_of(request_id, held[request_id]),
            )
            for request_id in largest[:MAX_REQUESTS]
        )

    def _points_of(self, request_id: str, lease: int) -> tuple[LeasePoint, ...]:
        known = self._points.get(request_id)
        if known is None:
            curve = self._curves.get(request_id, ())
            known = self._points[request_id] = self._in_blocks(curve, lease) if curve else ()
        return known

    def _in_blocks(self, curve: RowCurve, lease: int) -> tuple[LeasePoint, ...]:
        """The curve at whole blocks of legal leases, interpolated between its points."""
        size, least = self._units.block_tokens, self._units.least_blocks
        most = self._first.blocks_per_request
        rows, misses = zip(*curve, strict=True)
        blocks = {min(most, max(least, -(-point // size))) for point in rows}
        exact = sorted(point for point in blocks if point <= lease)
        above = sorted(point for point in blocks if point > lease)
        every = -(-len(above) // _POINTS_ABOVE) or 1
        chosen = [*exact, *above[::-every][::-1]]
        found = np.interp([point * size for point in chosen], rows, misses).tolist()
        return tuple(LeasePoint(*point) for point in zip(chosen, found, strict=True))
