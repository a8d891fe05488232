"""The host memory of one engine in one object: pool, offload pool, ledger, checks, release.

Does the work around scheduling passes, reports and commands that lets blocks move safely.
``ledger`` moves the blocks; ``invariants`` has the rules. Engine thread only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from hisparsed.engine.host.check import LedgerReader, LedgerWatch
from hisparsed.engine.host.chunks import ChunkLayout
from hisparsed.engine.host.ledger import HostLedger
from hisparsed.engine.host.offload import LentOffloadingManager
from hisparsed.engine.host.pool import CountingHostPool
from hisparsed.policy.decisions import EngineCommand
from hisparsed.policy.signals import (
    GhostPoint,
    HiSparsePool,
    Ledger,
    OffloadPool,
    Reserve,
)

ReleaseHost = Callable[[Sequence[int]], int]
"""Gives the memory of host blocks back to the operating system; returns the bytes of whole
pages that are then without memory. Their content is lost. Blocks released before may be named
again."""

_BUSY_STEP_BLOCKS = 256
"""Blocks that one step moves while requests run: a few milliseconds of the engine thread."""
_IDLE_STEP_BLOCKS = 4096
"""Blocks that a command or report moves on an idle engine, on which a call may arrive meanwhile:
about 0.1 s. 41,000 at once stopped the engine for 1.5 s."""


class HostFigures(NamedTuple):
    """The host memory's part of a report, by the report's own names."""

    hisparse: HiSparsePool
    offload: OffloadPool
    reserve: Reserve
    pending_blocks: int
    draining_blocks: int
    ledger: Ledger


class HostMemory:
    """``coordinator`` is vLLM's HiSparse coordinator, ``offload`` its offloading manager.

    ``freed_later`` gives the blocks that finished calls hold until a step in flight has ended.
    """

    def __init__(
        self,
        coordinator: Any,
        offload: LentOffloadingManager,
        layout: ChunkLayout,
        floor_blocks: int,
        freed_later: Callable[[], Iterable[Any]],
    ) -> None:
        pool = coordinator.get_host_block_pool()
        pool.__class__ = CountingHostPool
        pool.start_counting()
        pool.after_reset = offload.forget_idle
        offload.bind_layout(layout)
        self.pool: CountingHostPool = pool
        self.offload = offload
        self._floor_blocks = floor_blocks
        self.ledger = HostLedger(pool, offload, layout, floor_blocks)
        reader = LedgerReader(self.ledger, pool, offload, coordinator, freed_later)
        self.watch = LedgerWatch(self.ledger, reader)
        self._given_back = 0
        self._release_wanted = False
        self._released: frozenset[int] = frozenset()
        self._released_bytes = 0
        self._resets_before_pass: deque[int] = deque()
        self._resets_at_last_pass = 0

    # --- around a scheduling pass -----------------------------------------------------

    def advance(self, head_need_blocks: int, *, busy: bool) -> None:
        """Let the ledger take its step; a bounded one while requests run."""
        if not self.ledger.settled():
            self.ledger.advance(head_need_blocks, _BUSY_STEP_BLOCKS if busy else _IDLE_STEP_BLOCKS)

    def scheduling(self) -> AbstractContextManager[None]:
        """No block moves inside the pass: the chunks that vLLM has looked up stay until they are
        loaded."""
        self._resets_at_last_pass = self.offload.resets
        self._resets_before_pass.append(self.offload.resets)
        return self.ledger.scheduling()

    def pass_done(self, *, idle_with_waiting: bool, head_need_blocks: int) -> None:
        """After a pass. If nothing runs because blocks are missing, lent blocks return at once."""
        short = head_need_blocks - self.pool.get_num_free_blocks()
        if idle_with_waiting and short > 0:
            self._given_back += self.ledger.give_back(short)

    def reset_is_on_its_way(self) -> bool:
        """Whether the offload pool was reset since the last pass, so that no step has done the
        flush of the transfers in flight yet. Nothing was stored since."""
        return self.offload.settling_slots > 0 and self.offload.resets != self._resets_at_last_pass

    def output_taken(self) -> None:
        """The workers have done the step of the oldest pass, and so its flushes."""
        if self._resets_before_pass:
            self.offload.settle(self._resets_before_pass.popleft())

    # --- report and command -----------------------------------------------------------

    def require_possible(self, command: EngineCommand, release_host: ReleaseHost | None) -> None:
        """Raises ``ValueError`` for what this node cannot do, and while levers are frozen."""
        if command.release_reserve and release_host is None:
            raise ValueError(
                "release_reserve: the host memory of this node is pinned and cannot be given back "
                "while it serves; restart with a smaller host_budget"
            )
        if command.clear_violations:
            self.watch.clear()
        self.watch.require_sound()

    def apply(
        self,
        command: EngineCommand,
        release_host: ReleaseHost | None,
        head_need_blocks: int,
        *,
        busy: bool,
    ) -> None:
        """Apply targets and take the first step towards them."""
        if command.reserve_target_blocks is not None:
            self.ledger.set_reserve_target(command.reserve_target_blocks)
        if command.offload_target_blocks is not None:
            self.ledger.set_offload_target(command.offload_target_blocks)
        if command.release_reserve is not None:
            self._release_wanted = command.release_reserve
        self.advance(head_need_blocks, busy=busy)
        self.release(release_host)

    def release(self, release_host: ReleaseHost | None) -> None:
        """Return the memory of blocks that are new in the reserve, if that is wanted."""
        reserve = frozenset(self.ledger.reserve_blocks)
        if not self._release_wanted or release_host is None:
            reserve = frozenset()
        if reserve == self._released:
            return
        # Neighbours share pages, so the whole reserve is named, not only what is new.
        self._released_bytes = release_host(sorted(reserve)) if reserve and release_host else 0
        self._released = reserve

    def figures(
        self,
        release_host: ReleaseHost | None,
        hisparse_ghost: tuple[GhostPoint, ...],
        offload_ghost: tuple[GhostPoint, ...],
    ) -> HostFigures:
        """Also checks a few blocks, and moves blocks on an idle engine, which takes no steps."""
        self.watch.look()
        self.release(release_host)
        host, cached = self.ledger.counts(), self.pool.idle_cached_blocks
        return HostFigures(
            HiSparsePool(
                capacity_blocks=host.hisparse_capacity,
                target_blocks=self.ledger.budget - host.offload_target - host.reserve_target,
                in_use_blocks=host.hisparse_in_use,
                cached_blocks=cached,
                free_blocks=max(0, host.hisparse_idle - cached),
                ghost=hisparse_ghost,
                floor_blocks=self._floor_blocks,
            ),
            OffloadPool(
                capacity_chunks=host.lent * self.offload.layout.chunks_per_block,
                target_blocks=host.offload_target,
                lent_blocks=host.lent,
                in_use_chunks=self.offload.in_flight_chunks,
                stored_chunks=self.offload.stored_chunks,
                ghost=offload_ghost,
            ),
            Reserve(
                target_blocks=host.reserve_target,
                blocks=host.reserve,
                can_release=release_host is not None,
                releasing=self._release_wanted,
                released_bytes=self._released_bytes,
            ),
            pending_blocks=host.pending,
            draining_blocks=host.draining,
            ledger=Ledger(self.watch.found, self.watch.total, self._given_back),
        )
