"""No GPU block is written again while its store is in flight, whichever cache group takes it.

vLLM flushes a finished request's stores when a block of theirs is handed out again, but looks
only at the groups that it offloads. With HiSparse, resident and hot groups take their blocks from
the same GPU pool as the indexer group: their new blocks count here too. Installed over vLLM's
live offloading scheduler.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)


class FencedOffloadingScheduler(OffloadingConnectorScheduler):  # type: ignore[misc]
    """Tells vLLM of every GPU block that a pass has handed out, before it decides what to flush."""

    _device_groups: tuple[int, ...]

    def start_fencing(self, device_groups: tuple[int, ...]) -> None:
        self._device_groups = device_groups

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        for groups in _new_blocks(scheduler_output):
            for group in self._device_groups:
                self._current_batch_allocated_block_ids.update(groups[group])
        # Group tables are padded with the null block.
        self._current_batch_allocated_block_ids.discard(0)
        return super().build_connector_meta(scheduler_output)


def fence_stores(offloading_scheduler: Any, kv_cache_config: Any) -> None:
    """Re-class vLLM's offloading scheduler. Host groups number other blocks and are left out."""
    groups = kv_cache_config.kv_cache_groups
    offloading_scheduler.__class__ = FencedOffloadingScheduler
    offloading_scheduler.start_fencing(
        tuple(index for index, group in enumerate(groups) if not group.host_resident)
    )


def _new_blocks(scheduler_output: Any) -> Iterator[tuple[list[int], ...]]:
    """Blocks a request has been given in this pass, by group."""
    for request in scheduler_output.scheduled_new_reqs:
        yield request.block_ids
    for new_block_ids in scheduler_output.scheduled_cached_reqs.new_block_ids:
        if new_block_ids is not None:
            yield new_block_ids
