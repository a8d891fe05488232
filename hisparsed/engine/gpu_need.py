"""How many GPU blocks the head of the waiting queue was refused for want of.

vLLM counts them when it tries to start a call and forgets the number, so its answers are
watched. Changes nothing of what vLLM decides.
"""

from __future__ import annotations

from typing import Any


class GpuNeed:
    """Watches ``cache_manager``, vLLM's KV-cache manager, from now on."""

    def __init__(self, cache_manager: Any) -> None:
        coordinator = cache_manager.coordinator
        self._manager = cache_manager
        self._count = coordinator.get_num_blocks_to_allocate
        self._allocate = cache_manager.allocate_slots
        self._counted = 0
        self._refused: tuple[str, int] | None = None
        coordinator.get_num_blocks_to_allocate = self._counting
        cache_manager.allocate_slots = self._allocating

    def of(self, request_id: str) -> int | None:
        """Blocks without which ``request_id`` could not start; ``None`` if it was not tried."""
        if self._refused is None or self._refused[0] != request_id:
            return None
        return self._refused[1]

    def _counting(self, *args: Any, **kwargs: Any) -> int:
        self._counted = int(self._count(*args, **kwargs))
        return self._counted

    def _allocating(self, request: Any, *args: Any, reserved_blocks: int = 0, **kwargs: Any) -> Any:
        blocks = self._allocate(request, *args, reserved_blocks=reserved_blocks, **kwargs)
        if blocks is None:
            spare = reserved_blocks
            if kwargs.get("has_scheduled_reqs"):
                spare += int(self._manager.watermark_blocks)
            self._refused = request.request_id, self._counted + spare
        return blocks
