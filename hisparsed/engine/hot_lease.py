"""Hot buffers of different sizes a request: the multiplier as a live lever.

Stock vLLM leases the same number of blocks to every request and compares lengths, so the
size cannot change under running requests. Here each request has its own agreed size: that
in force when it first asked, grown later while the GPU pool has room, shrunk when the node's
workers have moved the rows that stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import HiSparseHotManager


class LeasedHotManager(HiSparseHotManager):  # type: ignore[misc]
    """A hot manager with an agreed lease size a request.

    ``blocks_per_request`` stays what it was: the upper bound that vLLM sized its tables for.
    ``grow_headroom``: GPU blocks that growing leaves free; ``None`` grows no running request.
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
        """Sizes of their own for requests that have a lease; those not named keep theirs.

        What is larger than its target is given back by ``shrink``, what is smaller grows.
        """
        for request_id, own in blocks.items():
            if request_id in self.lease_blocks:
                self._own_targets[request_id] = min(own, self.blocks_per_request)

    def forget_targets(self) -> None:
        """All requests are to have the multiplier's lease."""
        self._own_targets.clear()

    def individual_leases(self) -> int:
        """Requests whose target is not the multiplier's."""
        shared: int = self.next_lease_blocks
        return sum(own != shared for own in self._own_targets.values())

    def target_of(self, request_id: str) -> int:
        """Blocks that the request is to have."""
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
        # Every hot group plans before any allocates, so each takes its part of the room.
        room = (self.block_pool.get_num_free_blocks() - self._grow_headroom) // self._hot_groups
        growth: int = max(0, min(self.target_of(request_id) - self.lease_of(request_id), room))
        self._planned_growth[request_id] = growth
        return growth

    def get_num_required_blocks(self, request_id: str) -> int:
        held = len(self.req_to_blocks.get(request_id, ()))
        return max(self.lease_of(request_id) - held, 0)

    def shrink(self, request_id: str, blocks: int) -> None:
        """Give back what a request holds beyond ``blocks``; its rows must have moved before."""
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
