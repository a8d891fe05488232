"""The pages on the GPU: separate from block tables since vLLM 0.32.

Before, the coordinator removed a page that left the GPU from the request's block table, and sent
the whole table to the workers again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

try:
    from vllm.v1.hisparse.types import ACTIVE_TAIL_PAGES
except ImportError:
    from vllm.v1.hisparse.coordinator import _ACTIVE_TAIL_PAGES as ACTIVE_TAIL_PAGES

__all__ = ["ACTIVE_TAIL_PAGES", "ResidencyReader", "watch_lost_pages"]


def watch_lost_pages(coordinator: Any, lost: Callable[[Any, str], None]) -> None:
    """Call ``lost(manager, request_id)`` for each page that a resident manager loses.

    Does nothing where vLLM asks the manager itself, by ``drop_resident_page``.
    """
    if not hasattr(coordinator, "block_table_updates"):
        return
    lose_page = coordinator._lose_page

    def losing(request_id: str, page: int) -> None:
        resident = [
            manager
            for manager in coordinator.resident_managers
            if manager.get_resident_page(request_id, page) is not None
        ]
        lose_page(request_id, page)
        for manager in resident:
            if manager.get_resident_page(request_id, page) is None:
                lost(manager, request_id)

    coordinator._lose_page = losing


class ResidencyReader:
    """The message of a step to workers about resident pages, as (request id, pages, block ids per
    group).

    ``first`` is the first resident cache group of ``groups``.
    """

    def __init__(self, first: int, groups: int) -> None:
        self._groups = slice(first, first + groups)
        self._pages: dict[str, int] = {}

    def updates(
        self, output: Any, hisparse: Any
    ) -> Iterator[tuple[str, list[int], Sequence[list[int]]]]:
        """``output`` is the step's ``SchedulerOutput``, ``hisparse`` its connector's metadata."""
        if hasattr(hisparse, "residency_updates"):
            for request_id, update in hisparse.residency_updates.items():
                yield request_id, update.pages, update.block_ids
            return
        for request_id in (*output.finished_req_ids, *(output.preempted_req_ids or ())):
            self._pages.pop(request_id, None)
        whole = output.block_table_updates or {}
        for new in output.scheduled_new_reqs:
            self._pages[new.req_id] = 0
            yield from self._appended(new.req_id, new.block_ids)
        cached = output.scheduled_cached_reqs
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if block_ids is not None and request_id not in whole:
                yield from self._appended(request_id, block_ids)
        for request_id, block_ids in whole.items():
            if request_id in self._pages:
                self._pages[request_id] = 0
                yield from self._appended(request_id, block_ids)

    def _appended(
        self, request_id: str, block_ids: Sequence[list[int]]
    ) -> Iterator[tuple[str, list[int], Sequence[list[int]]]]:
        resident = block_ids[self._groups]
        start = self._pages[request_id]
        pages = list(range(start, start + len(resident[0])))
        if pages:
            self._pages[request_id] = pages[-1] + 1
            yield request_id, pages, resident
