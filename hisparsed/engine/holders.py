"""Calls that hold blocks while they wait, and what to do when they wait for each other.

A call whose prefix was loaded keeps its blocks until it runs, and vLLM preempts running calls
only. So two such calls can hold what the other needs, for ever. The youngest then gives its
blocks back and starts anew, as a preempted call would.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.request import RequestStatus

from hisparsed.engine.compat.waiting import holders, remove_holder


def loads_are_done(scheduler: Any) -> bool:
    """Whether no call that holds blocks still waits for its prefix to arrive."""
    return all(
        request.status != RequestStatus.WAITING_FOR_REMOTE_KVS
        or request.request_id in scheduler.finished_recving_kv_req_ids
        for request in holders(scheduler)
    )


def take_back_from_youngest(scheduler: Any, *, least: int = 2) -> Any:
    """Free the blocks of the last call that holds some; returns it, or ``None``.

    ``scheduler`` is vLLM's, between passes, with nothing running and nothing in flight. One
    call alone waits for nobody, so it keeps what it has unless ``least`` is 1.
    """
    holding = holders(scheduler)
    if len(holding) < least or not loads_are_done(scheduler):
        return None
    request = holding[-1]
    remove_holder(scheduler, request)
    # A finished load must not be taken for the end of the one that it starts next.
    scheduler.finished_recving_kv_req_ids.discard(request.request_id)
    scheduler.failed_recving_kv_req_ids.discard(request.request_id)
    scheduler.kv_cache_manager.free(request)
    request.num_computed_tokens = 0
    preempted = bool(request.num_preemptions)
    request.status = RequestStatus.PREEMPTED if preempted else RequestStatus.WAITING
    scheduler.waiting.prepend_request(request)
    return request
