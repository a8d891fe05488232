"""Calls that wait and hold blocks: a queue of their own since vLLM 0.31.

Before, every call that a pass had to skip shared one queue, whether it held blocks or not.
``scheduler`` is vLLM's.
"""

from __future__ import annotations

from typing import Any


def waiting_queues(scheduler: Any) -> tuple[Any, Any]:
    """Calls that hold nothing yet, and the queue with those that do."""
    return scheduler.waiting, _second_queue(scheduler)


def holders(scheduler: Any) -> list[Any]:
    """Calls that wait and hold blocks, those that wait for a load included, oldest first."""
    if hasattr(scheduler, "kv_holding_waiting"):
        return list(scheduler.kv_holding_waiting)
    manager = scheduler.kv_cache_manager
    return [
        request
        for request in scheduler.skipped_waiting
        if any(manager.get_block_ids(request.request_id))
    ]


def remove_holder(scheduler: Any, request: Any) -> None:
    """Take one of ``holders`` out of its queue."""
    _second_queue(scheduler).remove_requests([request])


def _second_queue(scheduler: Any) -> Any:
    if hasattr(scheduler, "kv_holding_waiting"):
        return scheduler.kv_holding_waiting
    return scheduler.skipped_waiting
