"""Who of the running requests has how large a hot buffer: the multiplier's side of the engine.

Puts multiplier and individual leases in force over vLLM's hot managers, all index groups alike,
and reports them. Rows move before their blocks are given back. How a lease grows is in
``hot_lease``; who should have how much is the policy's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hisparsed.engine.hot_lease import LeasedHotManager
from hisparsed.engine.messages import (
    EngineCommand,
    HotReport,
    LeasePointReport,
    MissCurvePoint,
    RequestHotReport,
)
from hisparsed.engine.worker_report import RowCurve, WorkerReport

ResizeHot = Callable[[dict[str, int]], None]
"""Shrinks the hot buffers of requests to a number of blocks a group, rows moved first."""

MAX_REQUESTS = 256
_POINTS_ABOVE = 4
"""Estimates above the lease that a curve reports; a report of many requests stays small."""


@dataclass(frozen=True)
class HotUnits:
    """What hot blocks mean on a node. ``least_rows``: of a legal lease.

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

    ``live`` says that the node's kernels take leases of different sizes.
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
        self._points: dict[str, list[LeasePointReport]] = {}

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
        """Put multiplier and leases of a possible command in force.

        A new multiplier ends leases of their own: what they divided is no longer there.
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
        # The rows that stay move first; only then may their old blocks be used by others.
        resize_hot(wider)
        for manager in self._managers:
            for request_id, blocks in wider.items():
                manager.shrink(request_id, blocks)

    # --- report -----------------------------------------------------------------------

    def report(self, workers: WorkerReport) -> HotReport:
        counted, first = workers.counters, self._first
        leased = [manager.req_to_blocks for manager in self._managers]
        curves = workers.request_curves
        return HotReport(
            multiplier=self.multiplier,
            lease_blocks=self.lease_blocks,
            leased_requests=len(first.lease_blocks),
            leased_blocks=sum(len(blocks) for table in leased for blocks in table.values()),
            references=counted["references"],
            resident=counted["resident"],
            hits=counted["hits"],
            loads=counted["loads"],
            spills=counted["spills"],
            dropped=counted["dropped"],
            h2d_bytes=counted["h2d_bytes"],
            miss_curve=[
                MissCurvePoint(multiplier=rows / self._units.topk, misses=misses)
                for rows, misses in workers.miss_curve
            ],
            counted=workers.counted,
            requests=[] if curves is None else self._requests(curves),
            individual_leases=first.individual_leases(),
        )

    def _requests(self, curves: Mapping[str, RowCurve]) -> list[RequestHotReport]:
        if curves is not self._curves:
            self._curves, self._points = curves, {}
        held = {
            request_id: len(blocks)
            for request_id, blocks in self._first.req_to_blocks.items()
            if blocks
        }
        largest = sorted(held, key=lambda request_id: (-held[request_id], request_id))
        return [
            RequestHotReport(
                request_id=request_id,
                lease_blocks=held[request_id],
                target_blocks=self._first.target_of(request_id),
                curve=self._points_of(request_id, held[request_id]),
            )
            for request_id in largest[:MAX_REQUESTS]
        ]

    def _points_of(self, request_id: str, lease: int) -> list[LeasePointReport]:
        known = self._points.get(request_id)
        if known is None:
            curve = self._curves.get(request_id, ())
            known = self._points[request_id] = self._in_blocks(curve, lease) if curve else []
        return known

    def _in_blocks(self, curve: RowCurve, lease: int) -> list[LeasePointReport]:
        """The curve at whole blocks of legal leases, in proportion between its points."""
        size, least = self._units.block_tokens, self._units.least_blocks
        most = self._first.blocks_per_request
        rows, misses = zip(*curve, strict=True)
        blocks = {min(most, max(least, -(-point // size))) for point in rows}
        exact = sorted(point for point in blocks if point <= lease)
        above = sorted(point for point in blocks if point > lease)
        every = -(-len(above) // _POINTS_ABOVE) or 1
        chosen = [*exact, *above[::-every][::-1]]
        found = np.interp([point * size for point in chosen], rows, misses).tolist()
        return [
            LeasePointReport(blocks=point, misses_per_step=found_misses)
            for point, found_misses in zip(chosen, found, strict=True)
        ]
