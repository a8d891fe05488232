"""One line per request in the engine, made when the table is requested.

Separate from the report, which is made every tick and must stay cheap. No line holds text or tokens
of a prompt. Costs time in proportion to the lines, never to pages.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

from hisparsed.engine.messages import RequestRow, RequestTable
from hisparsed.engine.worker_report import NO_HOT_ROWS, HotRows

MAX_ROWS = 500


class ResidentPages(Protocol):
    """The methods that the table needs of a resident manager."""

    req_to_blocks: Mapping[str, Any]
    host_only_pages: Mapping[str, int]

    def residency(self, request_id: str) -> str: ...


def resident_blocks(resident: Sequence[ResidentPages]) -> int:
    """GPU blocks that hold sparse-MLA pages of requests."""
    return sum(
        sum(map(len, manager.req_to_blocks.values())) - sum(manager.host_only_pages.values())
        for manager in resident
    )


def request_table(
    scheduler: Any,
    resident: Sequence[ResidentPages],
    hot: Mapping[str, HotRows],
    *,
    max_rows: int = MAX_ROWS,
) -> RequestTable:
    """Running requests, then waiting ones in the order in which they would start.

    ``scheduler`` is vLLM's; ``hot`` has an entry for each request that the workers know.
    """
    began = time.perf_counter()
    running, waiting = scheduler.running, scheduler.waiting
    rows = [
        _row(scheduler, request, resident, hot, state="running")
        for request in islice(running, max_rows)
    ]
    rows += [
        _row(scheduler, request, resident, hot, state=_waiting_state(request))
        for request in islice(waiting, max_rows - len(rows))
    ]
    return RequestTable(
        rows=rows,
        running=len(running),
        waiting=len(waiting),
        omitted=len(running) + len(waiting) - len(rows),
        took_us=(time.perf_counter() - began) * 1e6,
    )


def _waiting_state(request: Any) -> str:
    return "preempted" if request.num_preemptions else "waiting"


def _row(
    scheduler: Any,
    request: Any,
    resident: Sequence[ResidentPages],
    hot: Mapping[str, HotRows],
    *,
    state: str,
) -> RequestRow:
    request_id = request.request_id
    counts = hot.get(request_id, NO_HOT_ROWS)
    pages = sum(len(manager.req_to_blocks.get(request_id, ())) for manager in resident)
    host_only = sum(manager.host_only_pages.get(request_id, 0) for manager in resident)
    kinds = {manager.residency(request_id) for manager in resident} if pages else set()
    return RequestRow(
        request_id=request_id,
        state=state,
        residency=(kinds.pop() if len(kinds) == 1 else "mixed") if kinds else None,
        context_tokens=int(request.num_tokens),
        computed_tokens=int(request.num_computed_tokens),
        resident_share=(pages - host_only) / pages if pages else None,
        hot_rows=counts.held,
        hot_capacity_rows=counts.capacity,
        references=counts.references,
        resident=counts.resident,
        hits=counts.hits,
        loads=counts.loads,
        preemptions=int(request.num_preemptions),
        age_s=scheduler.waited_s(request),
    )
