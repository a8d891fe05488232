"""Bookkeeping of HiSparse pages by page, where vLLM's keeps it by block.

A page has one GPU block in each index group (20 and more), and all of them move together: they are
allocated, copied to the host, unpinned and lost at the same moments. vLLM asks each group on its
own, for each page, several times per step; a prefill of 8,192 tokens costs it 20 to 40 ms. Here a
page is one object, and one group is asked for all. Every decision is the same as vLLM's: the same
blocks in the same order, the same metadata for workers, the same order of the free queue.
``tests/engine/test_pages.py`` drives both through the same calls and compares all of it.

``keep_pages_whole`` applies it to a scheduler's own managers, if vLLM's methods are those that it
was written for (``compat.replaced``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator, replay_boundaries
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.single_type_kv_cache_manager import (
    HiSparseHotManager,
    HiSparseResidentManager,
    SingleTypeKVCacheManager,
)
from vllm.v1.hisparse.coordinator import HiSparseCoordinator, _PendingSpill
from vllm.v1.hisparse.types import (
    SparseKVPageTransfer,
    SparseKVResidencyUpdate,
    SparseKVRowMirror,
)

from hisparsed.engine.compat.residency import ACTIVE_TAIL_PAGES
from hisparsed.engine.resident import CountingResidentManager


class ResidentPage:
    """The GPU blocks of one page, in the order of the index groups."""

    __slots__ = ("blocks", "host_hash", "ids", "is_watched", "owners")

    def __init__(self, blocks: tuple[Any, ...]) -> None:
        self.blocks = blocks
        self.ids: tuple[int, ...] = tuple([block.block_id for block in blocks])
        self.owners: set[tuple[str, int]] = set()
        """(request, page number) that read it although its blocks count as free."""
        self.host_hash: Any = None
        """Of the host page that it is a readable copy of."""
        self.is_watched = False
        """Whether the pool reports when one of its blocks is allocated."""


class PageTables:
    """Which pages of each request are on the GPU; ``None`` stands for one that is not.

    Tables follow the groups' block tables: new blocks are added when a table is asked for.
    """

    def __init__(self, managers: Sequence[Any]) -> None:
        self._rows = tuple(manager.req_to_blocks for manager in managers)
        self._known: dict[str, list[ResidentPage | None]] = {}
        self.host_only: dict[str, int] = {}
        """Pages of each request that are only on the host."""

    def known(self, request_id: str) -> list[ResidentPage | None]:
        """The blocks added so far; safe while some groups have more blocks than others."""
        return self._known.get(request_id, _NONE)

    def table(self, request_id: str) -> list[ResidentPage | None]:
        """All pages that every group has a block for."""
        known = self._known.get(request_id)
        if known is None:
            if request_id not in self._rows[-1]:
                return []
            known = self._known[request_id] = []
        last = self._rows[-1].get(request_id, ())
        if len(known) < len(last):
            begin, end = len(known), len(last)
            columns = [rows[request_id][begin:end] for rows in self._rows]
            known.extend(
                [
                    None if blocks[0].is_null else ResidentPage(blocks)
                    for blocks in zip(*columns, strict=True)
                ]
            )
        return known

    def drop(self, request_id: str, page: int) -> ResidentPage | None:
        """The request no longer reads that page from the GPU; returns the page."""
        known = self.known(request_id)
        found = known[page] if page < len(known) else None
        if found is not None:
            known[page] = None
            self.host_only[request_id] = self.host_only.get(request_id, 0) + 1
        return found

    def adopt(self, request_id: str, page: int, found: ResidentPage) -> None:
        """The request reads a page from the GPU that it had only on the host."""
        self._known[request_id][page] = found
        self.host_only[request_id] = self.host_only.get(request_id, 0) - 1

    def forget(self, request_id: str) -> None:
        self._known.pop(request_id, None)
        self.host_only.pop(request_id, None)


_NONE: list[ResidentPage | None] = []


class PagedResidentManager(CountingResidentManager):
    """One index group's resident manager. It reads residency from the tables that all share."""

    def share(self, tables: PageTables, group: int, groups: int) -> None:
        self._tables = tables
        self._group = group
        self._is_last = group == groups - 1
        self.host_only_pages = tables.host_only

    def _add_host_only(self, request_id: str, pages: int) -> None:
        if self._group == 0:
            super()._add_host_only(request_id, pages)

    def get_resident_page(self, request_id: str, block_idx: int) -> Any:
        known = self._tables.known(request_id)
        if block_idx < len(known):
            page = known[block_idx]
            return None if page is None else page.blocks[self._group]
        blocks = self.req_to_blocks.get(request_id)
        if blocks is None or block_idx >= len(blocks):
            return None
        block = blocks[block_idx]
        return None if block.is_null else block

    def get_residency_row(self, request_id: str, start: int = 0) -> list[Any]:
        blocks: list[Any] = self.req_to_blocks.get(request_id, [])[start:]
        known = self._tables.known(request_id)[start:]
        if not known:
            return blocks
        group, null = self._group, self._null_block
        row = [null if page is None else page.blocks[group] for page in known]
        return row + blocks[len(known) :]

    def adopt_resident_page(self, request_id: str, block_idx: int, block: Any) -> bool:
        raise NotImplementedError("pages are adopted whole, by their coordinator")

    def drop_resident_page(self, request_id: str, block_idx: int) -> Any:
        raise NotImplementedError("pages are dropped whole, by their coordinator")

    def pop_blocks_for_free(self, request_id: str) -> list[Any]:
        blocks: list[Any] = super().pop_blocks_for_free(request_id)
        if self._is_last:
            self._tables.forget(request_id)
        return blocks


class PagedBlockPool(BlockPool):  # type: ignore[misc]
    """The GPU pool, which allocates blocks without a call for each, and knows pages."""

    def watch_pages(self, coordinator: PagedCoordinator) -> None:
        self._page_lost = coordinator.page_lost

    def get_new_blocks(self, num_blocks: int) -> list[Any]:
        if self.metrics_collector is not None or not self.enable_caching:
            blocks: list[Any] = super().get_new_blocks(num_blocks)
            return blocks
        if num_blocks > self.get_num_free_blocks():
            raise ValueError(f"Cannot get {num_blocks} free blocks from the pool")
        blocks = self.free_block_queue.popleft_n(num_blocks)
        if self._reuse_watchers:
            self._notify_reuse(blocks)
        more_hashes = self.cached_block_hashes_by_block
        for block in blocks:
            if block._block_hash is not None or block.block_id in more_hashes:
                self._maybe_evict_cached_block(block)
            block.ref_cnt += 1
        return blocks

    def _notify_reuse(self, blocks: Iterable[Any]) -> None:
        take = self._reuse_watchers.pop
        for block in blocks:
            page = take(block.block_id, None)
            if page is not None and page.is_watched:
                page.is_watched = False
                self._page_lost(page)

    def pin(self, page: ResidentPage) -> None:
        """As ``touch``: one more reference on each block."""
        for block in page.blocks:
            if block.ref_cnt == 0:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1

    def _watch(self, page: ResidentPage) -> None:
        if not page.is_watched:
            page.is_watched = True
            self._reuse_watchers.update(dict.fromkeys(page.ids, page))

    def unpin(self, page: ResidentPage) -> None:
        """As ``unpin_blocks`` of each block in turn: readable until one is handed out."""
        self._watch(page)
        released = []
        for block in page.blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                released.append(block)
        if released:
            self.free_block_queue.append_n(released)

    def unpin_in_order(self, pages: Sequence[ResidentPage]) -> None:
        """The first group's blocks of all ``pages`` first, in the order in which an ending request
        frees them."""
        for page in pages:
            self._watch(page)
        for blocks in zip(*[page.blocks for page in pages], strict=True):
            released = []
            for block in blocks:
                block.ref_cnt -= 1
                if block.ref_cnt == 0:
                    released.append(block)
            self.free_block_queue.append_n(released)

    def unpin_copied(self, blocks: Sequence[Any]) -> None:
        """As ``free_blocks`` of each block in turn."""
        released = []
        for block in blocks:
            if block._block_hash is not None:
                self.free_blocks([block])
                continue
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                released.append(block)
        if released:
            released.reverse()
            self.free_block_queue.prepend_n(released)


class PagedCoordinator(HiSparseCoordinator):  # type: ignore[misc]
    """vLLM's coordinator with whole pages. Methods that are not here are vLLM's."""

    copies: dict[Any, ResidentPage]
    resident_managers: tuple[Any, ...]

    def start_paging(self) -> None:
        groups = len(self.resident_managers)
        self.pages = PageTables(self.resident_managers)
        for group, manager in enumerate(self.resident_managers):
            manager.__class__ = PagedResidentManager
            manager.share(self.pages, group, groups)
        self.gpu_pool.__class__ = PagedBlockPool
        self.gpu_pool.watch_pages(self)
        self._null_ids = tuple(
            manager.block_pool.null_block.block_id for manager in self.resident_managers
        )
        self._committed: tuple[str, int] | None = None

    # --- prefixes that come back to the GPU ---------------------------------------------

    def commit_computed_blocks(self, request_id: str, num_host_pages: int) -> None:
        # Every group gives the same answer.
        if self._committed != (request_id, num_host_pages):
            super().commit_computed_blocks(request_id, num_host_pages)
            self._committed = (request_id, num_host_pages)

    def _adopt_copies(self, request_id: str, state: Any, host_blocks: Sequence[Any]) -> None:
        if not self.copies:
            return
        table = self.pages.table(request_id)
        for number, host_block in enumerate(host_blocks[: len(table)]):
            if table[number] is not None or host_block.is_null:
                continue
            page = self.copies.get(host_block.block_hash)
            if page is None:
                continue
            self.pages.adopt(request_id, number, page)
            self.gpu_pool.pin(page)
            state.pinned_clean.add(number)
            if number < state.synced_pages:
                state.stale_pages.add(number)

    def _record_copy(self, request_id: str, page_idx: int, host_block: Any) -> None:
        block_hash = host_block.block_hash
        if host_block.is_null or block_hash is None:
            return
        page = self._page(request_id, page_idx)
        if page is None:
            return
        self._drop_copy(block_hash)
        self.copies[block_hash] = page
        page.host_hash = block_hash

    def _drop_copy(self, host_hash: Any) -> None:
        page = self.copies.pop(host_hash, None)
        if page is not None:
            page.host_hash = None

    def _page(self, request_id: str, number: int) -> ResidentPage | None:
        table = self.pages.table(request_id)
        return table[number] if number < len(table) else None

    # --- pages that leave the GPU ---------------------------------------------------------

    def _can_read_from_host(self, request_id: str) -> bool:
        # Groups are leased alike, one after another: with the last one, all have their lease.
        hot = self.hot_managers
        return bool(hot) and hot[-1].has_hot(request_id) and hot[0].has_hot(request_id)

    def _unpin_page(self, request_id: str, state: Any, page_idx: int) -> bool:
        if page_idx in state.pending_pages or page_idx not in state.valid_pages:
            return False
        table = self.pages.table(request_id)
        if page_idx >= len(table) - ACTIVE_TAIL_PAGES:
            return False
        page = table[page_idx]
        if page is None:
            return False
        page.owners.add((request_id, page_idx))
        self.gpu_pool.unpin(page)
        state.pinned_clean.discard(page_idx)
        state.unpinned_pages.add(page_idx)
        return True

    def page_lost(self, page: ResidentPage) -> None:
        """One of its blocks is handed out, so it cannot be read any more."""
        if page.host_hash is not None:
            self._drop_copy(page.host_hash)
        owners, page.owners = page.owners, set()
        for request_id, number in owners:
            self._lose_page(request_id, number)

    def _lose_page(self, request_id: str, page_idx: int) -> None:
        self._resident_requests.discard(request_id)
        state = self.request_states.get(request_id)
        if state is None:
            return
        page = self.pages.drop(request_id, page_idx)
        if page is not None:
            page.owners.discard((request_id, page_idx))
        state.unpinned_pages.discard(page_idx)
        if page_idx < state.synced_pages:
            state.stale_pages.add(page_idx)
        # The last group is asked after all others.
        if self.hot_managers and request_id not in self.hot_managers[-1].hot_required:
            for manager in self.hot_managers:
                manager.require_hot(request_id)

    # --- copies to the host -----------------------------------------------------------------

    def plan_prefix_materialization(self, request_id: str, num_computed_tokens: int) -> None:
        size = self.host_manager.block_size
        num_pages = num_computed_tokens // size
        state = self._get_request_state(request_id)
        importing = -(-self._pending_imports.get(request_id, 0) // size)
        first_page = max(state.ready_prefix_pages, importing)
        if first_page >= num_pages:
            return
        budget = max(self.max_spill_pages - len(self.spills_to_send), 0)
        table = self.pages.table(request_id)
        for number in range(first_page, min(num_pages, len(table))):
            if budget == 0:
                break
            if number in state.pending_pages or number in state.valid_pages:
                continue
            if table[number] is not None and self._plan_page_transfer(
                request_id, number, after_forward=True
            ):
                budget -= 1

    def _plan_page_transfer(
        self, request_id: str, page_idx: int, *, after_forward: bool, restore: bool = False
    ) -> bool:
        state = self._get_request_state(request_id)
        if page_idx in state.pending_pages:
            return False
        host_blocks = self.host_manager.req_to_blocks.get(request_id)
        if host_blocks is None or page_idx >= len(host_blocks):
            return False
        host_block = host_blocks[page_idx]
        page = None if host_block.is_null else self._page(request_id, page_idx)
        if page is None:
            return False
        self.host_manager.block_pool.touch([host_block])
        self.gpu_pool.pin(page)
        spill_id = self.next_spill_id
        self.next_spill_id += 1
        self.pending_spills[spill_id] = _PendingSpill(
            transfer_id=spill_id,
            page=(request_id, page_idx),
            request_state=state,
            host_block=host_block,
            resident_blocks=page.blocks,
            restore=restore,
        )
        state.pending_pages[page_idx] = spill_id
        self.spills_to_send.append(
            SparseKVPageTransfer(
                transfer_id=spill_id,
                host_block_id=host_block.block_id,
                resident_block_ids=page.ids,
                after_forward=after_forward,
                restore=restore,
            )
        )
        return True

    def _apply_enqueued_spills(self) -> None:
        unpin = self.gpu_pool.unpin_copied
        for pending in self.pending_spills.values():
            expected = pending.expected_worker_completions
            if pending.enqueue_applied or not expected or pending.worker_completions < expected:
                continue
            unpin(pending.resident_blocks)
            pending.enqueue_applied = True

    # --- what workers are sent -----------------------------------------------------------------

    def build_row_mirrors(
        self, requests: Iterable[tuple[str, int, int]]
    ) -> tuple[SparseKVRowMirror, ...]:
        size = self.host_manager.block_size
        mirrors: list[SparseKVRowMirror] = []
        for request_id, first, count in requests:
            host_blocks = self.host_manager.req_to_blocks.get(request_id)
            if host_blocks is None:
                continue
            table = self.pages.table(request_id)
            following, end = first, first + count
            while following < end:
                number, offset = divmod(following, size)
                rows = min(size - offset, end - following)
                following += rows
                page = table[number] if number < len(table) else None
                host_block = host_blocks[number] if number < len(host_blocks) else None
                if page is None or host_block is None or host_block.is_null:
                    continue
                mirrors.append(
                    SparseKVRowMirror(
                        source_starts=tuple([one * size + offset for one in page.ids]),
                        destination_start=host_block.block_id * size + offset,
                        num_rows=rows,
                    )
                )
        return tuple(mirrors)

    def all_context_pages_resident(self, requests: Iterable[tuple[str, int, int]]) -> bool:
        first = self.resident_managers[0]
        host_only = self.pages.host_only
        for request_id, num_computed_tokens, num_scheduled_tokens in requests:
            num_pages = -(-(num_computed_tokens + num_scheduled_tokens) // first.block_size)
            if len(first.req_to_blocks.get(request_id, ())) < num_pages:
                return False
            if request_id in self._resident_requests:
                continue
            if host_only.get(request_id, 0):
                return False
            self._resident_requests.add(request_id)
        return True

    def take_residency_updates(
        self, request_ids: Iterable[str]
    ) -> Mapping[str, SparseKVResidencyUpdate]:
        updates: dict[str, SparseKVResidencyUpdate] = {}
        nowhere = self._null_ids
        for request_id in request_ids:
            state = self._get_request_state(request_id)
            table = self.pages.table(request_id)
            start, num_pages = state.synced_pages, len(table)
            if not state.stale_pages and start >= num_pages:
                continue
            numbers = [*sorted(state.stale_pages), *range(start, num_pages)]
            changed = [table[number] if number < num_pages else None for number in numbers]
            by_page = [nowhere if page is None else page.ids for page in changed]
            updates[request_id] = SparseKVResidencyUpdate(
                pages=numbers,
                block_ids=tuple(map(list, zip(*by_page, strict=True))),
            )
            state.stale_pages.clear()
            state.synced_pages = num_pages
        return updates

    # --- requests that end -----------------------------------------------------------------------

    def free(self, request_id: str) -> None:
        self._committed = None
        table = self.pages.table(request_id)
        state = self.request_states.get(request_id)
        # vLLM's own does what is about the host; without resident managers it walks no page.
        resident = self.resident_managers
        self.resident_managers = ()
        try:
            super().free(request_id)
        finally:
            self.resident_managers = resident
        if state is None:
            return
        unpinned = []
        # Tail first, so that a prefix loses its tail pages before its head.
        for number in range(len(table) - 1, -1, -1):
            page = table[number]
            if page is None:
                continue
            if number in state.unpinned_pages:
                page.owners.discard((request_id, number))
            elif number in state.valid_pages and number not in state.pending_pages:
                unpinned.append(page)
            else:
                continue
            self.pages.drop(request_id, number)
        self.gpu_pool.unpin_in_order(unpinned)


class GroupedCacheCoordinator(HybridKVCacheCoordinator):  # type: ignore[misc]
    """Asks one hot and one resident manager for all of them, because they would all give the same
    answer."""

    def start_grouping(self) -> None:
        managers = self.single_type_managers
        self._runs = [(kind, list(run)) for kind, run in groupby(managers, key=_kind)]
        self._caching = [
            (group, manager)
            for group, manager in enumerate(managers)
            if manager.enable_caching and _kind(manager) is SingleTypeKVCacheManager
        ]
        self._windowed = [one for one in managers if _overrides(one, "get_num_skipped_tokens")]
        self._stepping = [one for one in managers if _overrides(one, "new_step_starts")]

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: tuple[Sequence[Any], ...],
        num_encoder_tokens: int,
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        if self.retention_interval != 0:
            prefill_end = 0
        needed = group = 0
        for kind, run in self._runs:
            for number, manager in enumerate(run):
                one = manager.get_num_blocks_to_allocate(
                    request_id,
                    num_tokens,
                    new_computed_blocks[group + number],
                    total_computed_tokens,
                    num_local_computed_tokens,
                    num_tokens_main_model,
                    apply_admission_cap=apply_admission_cap,
                    prefill_end=prefill_end,
                )
                if kind is HiSparseResidentManager:
                    needed += one * len(run)
                    break
                needed += one
                # Hot managers also note by how much they grow.
                if kind is HiSparseHotManager and not one and not run[-1].plans(request_id):
                    break
            group += len(run)
        return int(needed)

    def allocate_new_blocks(
        self,
        request_id: str,
        num_tokens: int,
        num_tokens_main_model: int,
        num_encoder_tokens: int = 0,
    ) -> tuple[Sequence[Any], ...]:
        found: list[Sequence[Any]] = []
        for kind, run in self._runs:
            if kind is HiSparseResidentManager:
                found.extend(self._resident_blocks(request_id, num_tokens, run))
            elif kind is HiSparseHotManager and run[-1].needs_nothing(request_id):
                found.extend(() for _ in run)
            else:
                found.extend(
                    manager.allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)
                    for manager in run
                )
        return tuple(found)

    def _resident_blocks(
        self, request_id: str, num_tokens: int, run: Sequence[Any]
    ) -> Iterable[Sequence[Any]]:
        first = run[0]
        count = -(-num_tokens // first.block_size) - len(first.req_to_blocks[request_id])
        if count <= 0:
            return [() for _ in run]
        blocks = first.block_pool.get_new_blocks(count * len(run))
        shares = [blocks[start : start + count] for start in range(0, len(blocks), count)]
        for manager, share in zip(run, shares, strict=True):
            manager.req_to_blocks[request_id].extend(share)
        return shares

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        boundaries = replay_boundaries(
            request.num_prompt_tokens,
            self.scheduler_block_size,
            use_eagle=bool(getattr(self, "drop_eagle_group_ids", self.eagle_group_ids)),
        )
        for group, manager in self._caching:
            manager.cache_blocks(
                request,
                self.get_num_cacheable_tokens(num_computed_tokens, group),
                retention_interval=self.retention_interval,
                replay_boundaries=boundaries,
            )

    def remove_skipped_blocks(self, *args: Any, **kwargs: Any) -> None:
        for manager in self._windowed:
            manager.remove_skipped_blocks(*args, **kwargs)

    def new_step_starts(self) -> None:
        for manager in self._stepping:
            manager.new_step_starts()


class NoBlocks(KVCacheBlocks):  # type: ignore[misc]
    """The answer for a request that needs no block in a step, as most decoding requests."""

    def get_block_ids(self, allow_none: bool = False, **kwargs: Any) -> Any:
        return None if allow_none else super().get_block_ids(**kwargs)


def _kind(manager: Any) -> Any:
    for kind in (HiSparseHotManager, HiSparseResidentManager):
        if isinstance(manager, kind):
            return kind
    return SingleTypeKVCacheManager


def _overrides(manager: Any, name: str) -> bool:
    return getattr(type(manager), name) is not getattr(SingleTypeKVCacheManager, name)


def keep_pages_whole(cache_manager: Any, hisparse: Any) -> None:
    """Apply it to vLLM's cache manager and HiSparse coordinator, before any request."""
    hisparse.__class__ = PagedCoordinator
    hisparse.start_paging()
    cache_manager.empty_kv_cache_blocks = NoBlocks(cache_manager.empty_kv_cache_blocks.blocks)
    cache = cache_manager.coordinator
    if isinstance(cache, HybridKVCacheCoordinator):
        cache.__class__ = GroupedCacheCoordinator
        cache.start_grouping()
