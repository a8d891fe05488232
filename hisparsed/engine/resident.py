"""Resident pages: counted per request, and admitted with vLLM's cap in all cases.

A report walks no pages, because changes are counted where they happen. vLLM's coordinator chooses
which pages leave the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import HiSparseResidentManager

from hisparsed.engine.compat.adapters import admission_cap
from hisparsed.engine.compat.residency import ACTIVE_TAIL_PAGES


class CountingResidentManager(HiSparseResidentManager):  # type: ignore[misc]
    """A resident manager that knows how many pages of each request are only on the host."""

    def start_counting(self, committing: set[str]) -> None:
        """``committing`` is shared by all groups: calls whose prefix is being committed now."""
        self.host_only_pages: dict[str, int] = {}
        self._committing = committing

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[Any],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        *args: Any,
        apply_admission_cap: bool = False,
        **kwargs: Any,
    ) -> int:
        """vLLM's need, with the admission cap also where a prefix comes from outside.

        vLLM 0.32 and 0.33 do not apply the cap there and ask for pages for the whole remainder at
        once, although a prefill holds no more pages than its steps in flight. If that is more than
        the GPU pool, the call is never admitted and blocks those behind it.
        """
        needed = super().get_num_blocks_to_allocate(
            request_id,
            num_tokens,
            new_computed_blocks,
            total_computed_tokens,
            num_local_computed_tokens,
            *args,
            apply_admission_cap=apply_admission_cap,
            **kwargs,
        )
        if apply_admission_cap and total_computed_tokens > num_local_computed_tokens:
            # One more than the cap: the last imported page stays writable next to the steps.
            return min(int(needed), 1 + admission_cap(self))
        return int(needed)

    def _add_host_only(self, request_id: str, pages: int) -> None:
        self.host_only_pages[request_id] = self.host_only_pages.get(request_id, 0) + pages

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[Any],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        before = len(self.req_to_blocks.get(request_id, ()))
        self._committing.add(request_id)
        super().add_local_computed_blocks(
            request_id, new_computed_blocks, num_local_computed_tokens, num_external_computed_tokens
        )
        self._committing.discard(request_id)
        self._add_host_only(request_id, len(self.req_to_blocks[request_id]) - before)

    def allocate_external_computed_blocks(
        self,
        request_id: str,
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        before = len(self.req_to_blocks.get(request_id, ()))
        tail_page = (num_local_computed_tokens + num_external_computed_tokens - 1) // (
            self.block_size
        )
        tail_missing = tail_page < before and self.get_resident_page(request_id, tail_page) is None
        super().allocate_external_computed_blocks(
            request_id, num_local_computed_tokens, num_external_computed_tokens, *args, **kwargs
        )
        added = len(self.req_to_blocks[request_id]) - before
        # The tail page is always resident afterwards; every other added page is null.
        self._add_host_only(request_id, added - 1 if added else -int(tail_missing))

    def adopt_resident_page(self, request_id: str, block_idx: int, block: Any) -> bool:
        # vLLM 0.30 adopts before the call has its blocks, and the copy may be one of them.
        if request_id in self._committing:
            return False
        adopted = bool(super().adopt_resident_page(request_id, block_idx, block))
        if adopted:
            self._add_host_only(request_id, -1)
        return adopted

    def drop_resident_page(self, request_id: str, block_idx: int) -> Any:
        block = super().drop_resident_page(request_id, block_idx)
        if block is not None:
            self.count_lost_page(request_id)
        return block

    def count_lost_page(self, request_id: str) -> None:
        """A page of the request is only on the host from now on."""
        self._add_host_only(request_id, 1)

    def pop_blocks_for_free(self, request_id: str) -> list[Any]:
        blocks: list[Any] = super().pop_blocks_for_free(request_id)
        self.host_only_pages.pop(request_id, None)
        return blocks

    def residency(self, request_id: str) -> str:
        """``full``, ``mixed`` or ``none``: vLLM keeps the active tail resident always, so
        a request with nothing but its tail on the GPU counts as none."""
        host_only = self.host_only_pages.get(request_id, 0)
        if host_only == 0:
            return "full"
        resident = len(self.req_to_blocks.get(request_id, ())) - host_only
        return "none" if resident <= ACTIVE_TAIL_PAGES else "mixed"
