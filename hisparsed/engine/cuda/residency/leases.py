"""How many hot blocks each request has: what the scheduler tells its workers, and when.

A step's message names new requests and those whose hot blocks have changed since the last
message. Sizes are absolute, so a message means the same whatever came before it. No tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

Blocks = tuple[int, ...]
"""Hot blocks that a request holds, one number a hot group."""


@dataclass(frozen=True)
class Lease:
    """``fresh``: the request has just got its state row, and nothing of it is there."""

    request_id: str
    fresh: bool
    blocks: Blocks


@dataclass(frozen=True)
class LeaseNews:
    """What changed before one step."""

    leases: tuple[Lease, ...] = ()
    ended: tuple[str, ...] = ()


class SentLeases:
    """The scheduler's side."""

    def __init__(self) -> None:
        self._sent: dict[str, Blocks] = {}

    def news(
        self,
        scheduled: Iterable[str],
        *,
        fresh: Iterable[str],
        ended: Iterable[str],
        held: Callable[[str], Blocks],
    ) -> LeaseNews:
        """The message of a step. ``held`` says how many blocks a request has now.

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
        return LeaseNews(tuple(leases), gone)


class KnownLeases:
    """The worker's side: what its resolver has been told."""

    def __init__(self) -> None:
        self.blocks: dict[str, Blocks] = {}

    def take(self, news: LeaseNews) -> None:
        """Raises ``RuntimeError`` when a running request would shrink: its rows have not moved."""
        for request_id in news.ended:
            self.blocks.pop(request_id, None)
        for lease in news.leases:
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
