"""The offload pool that owns no memory: vLLM's CPU offloading over lent host blocks.

``LentOffloadingSpec`` is named in the connector's ``spec_name``. It lets vLLM build its own
manager, then re-classes it (the constructor differs between versions). Capacity changes in whole
host blocks, through ``lend`` and ``recall``; the ledger decides how many.

vLLM flushes a finished request's stores when one of their blocks is handed out again, but looks
only at the groups that it offloads. With HiSparse, resident and hot groups take their blocks from
the same GPU pool: ``FencedOffloadingScheduler`` counts their new blocks too, so no GPU block is
written again while its store is in flight. Since 0.33 vLLM may begin a load some passes after its
look-up (``defer_async_loads``); the chunks found are retained meanwhile. Not thread-safe: engine
thread only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from itertools import chain, islice
from typing import Any, cast

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    LoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadingManager,
    OffloadingWorker,
    OffloadKey,
    ReqContext,
    get_offload_block_hash,
)
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.request import RequestStatus

from hisparsed.engine.compat.adapters import unlock_manager
from hisparsed.engine.host.chunks import ChunkLayout, FreeSlots
from hisparsed.engine.host.ghost_list import GhostList


class LentOffloadingManager(CPUOffloadingManager):  # type: ignore[misc]
    """Chunks live in the slots of lent host blocks; a chunk id names block and slot.

    A recalled block drops its idle chunks at once. With loads or stores in flight it is *draining*:
    its slots are no longer used, and it is returned when the last transfer ends. After a cache
    reset, slots whose transfer vLLM has not flushed yet are *settling*: they hold no chunk and are
    not handed out before ``settle``.
    """

    _layout: ChunkLayout | None

    def start_unlent(self) -> None:
        """Turn a freshly built stock manager into one with no capacity."""
        self._layout = None
        self._lent: OrderedDict[int, None] = OrderedDict()  # usable blocks, coldest first
        self._empty: OrderedDict[int, None] = OrderedDict()  # those of them without a chunk
        self._draining: set[int] = set()
        self._drained: list[int] = []
        self._busy_slots: dict[int, int] = {}  # block -> slots with a chunk or settling
        self._key_of_chunk: dict[int, OffloadKey] = {}
        self._settling: dict[int, int] = {}  # chunk id -> reset after which it settles
        self.resets = 0
        self.ghost: GhostList | None = None
        self.found: list[OffloadKey] = []
        """Keys of look-ups that hit, in order, since it was emptied."""
        self._free_list = FreeSlots()
        self._num_allocated_chunks = 0
        self._set_capacity()

    def bind_layout(self, layout: ChunkLayout) -> None:
        if self._layout is not None and self._layout != layout:
            raise RuntimeError(f"chunk layout is already {self._layout}")
        self._layout = layout

    @property
    def layout(self) -> ChunkLayout:
        if self._layout is None:
            raise RuntimeError("the offload pool has no chunk layout: no ledger is bound to it")
        return self._layout

    @property
    def lent_blocks(self) -> int:
        """Host blocks held, draining ones included."""
        return len(self._lent) + len(self._draining)

    @property
    def draining_blocks(self) -> int:
        return len(self._draining)

    @property
    def stored_chunks(self) -> int:
        """Chunks with content or a store in flight."""
        return len(self._key_of_chunk)

    @property
    def in_flight_chunks(self) -> int:
        """Slots that a load or store is using now, settling ones included."""
        idle = int(self._num_evictable_cache_chunks)
        return len(self._key_of_chunk) - idle + len(self._settling)

    # --- read by the check of the ledger -----------------------------------------

    @property
    def drained_blocks(self) -> int:
        return len(self._drained)

    @property
    def free_slots(self) -> int:
        return len(self._free_list)

    @property
    def evictable_chunks(self) -> int:
        return int(self._num_evictable_cache_chunks)

    @property
    def write_pending_chunks(self) -> int:
        return int(self._num_write_pending_chunks)

    @property
    def settling_slots(self) -> int:
        return len(self._settling)

    @property
    def draining_busy_slots(self) -> int:
        return sum(self._busy_slots[block] for block in self._draining)

    def has_chunk(self, key: OffloadKey) -> bool:
        """Whether it holds the chunk or is storing it; this is not a use, so recency stays."""
        return self._policy.get(key) is not None

    def holds(self, block: int) -> bool:
        return block in self._busy_slots

    def is_draining(self, block: int) -> bool:
        return block in self._draining

    def is_empty(self, block: int) -> bool:
        """Whether it would be recalled without a search for chunks."""
        return block in self._empty

    def free_slots_of(self, block: int) -> int:
        return self._free_list.of_block(block)

    def busy_slots_of(self, block: int) -> int:
        return self._busy_slots[block]

    def settling_slots_of(self, block: int) -> int:
        return sum(chunk in self._settling for chunk in self.layout.chunk_ids(block))

    def chunk_refs(self, block: int) -> tuple[int | None, ...]:
        """Reference counts of the block's chunks: -1 a store, above 0 loads in flight."""
        found: list[int | None] = []
        for chunk_id in self.layout.chunk_ids(block):
            key = self._key_of_chunk.get(chunk_id)
            if key is not None:
                chunk = self._policy.get(key)
                known = chunk is not None and int(chunk.chunk_id) == chunk_id
                found.append(int(chunk.ref_cnt) if known else None)
        return tuple(found)

    # --- moves ------------------------------------------------------------------------

    def lend(self, block_ids: Iterable[int]) -> None:
        """Add host blocks; their slots are free at once."""
        for block in block_ids:
            if block in self._busy_slots:
                raise RuntimeError(f"host block {block} is lent already")
            self._busy_slots[block] = 0
            self._lent[block] = None
            self._empty[block] = None
            self._free_list.add(block, self.layout.chunk_ids(block))
        self._set_capacity()

    def recall(self, count: int) -> list[int]:
        """Give back up to ``count`` blocks, coldest first; returns those free right now.

        Blocks with a transfer in flight start draining and count towards ``count``; they
        are handed out later by ``take_drained``.
        """
        stored = (block for block in self._lent if block not in self._empty)
        victims = list(islice(chain(self._empty, stored), count))
        evicted: list[OffloadKey] = []
        for block in victims:
            del self._lent[block]
            self._free_list.drop(block)
            self._draining.add(block)
            if block in self._empty:
                del self._empty[block]
                self._drained.append(block)
            else:
                evicted.extend(self._evict_idle(block))
        self._tell_evicted(evicted)
        if victims:
            self._set_capacity()
        return self.take_drained()

    def take_drained(self) -> list[int]:
        """Blocks whose draining has ended since the last call; the offload pool no longer owns
        them."""
        drained, self._drained = self._drained, []
        for block in drained:
            self._draining.discard(block)
            del self._busy_slots[block]
        return drained

    def forget_idle(self) -> None:
        """Drop every chunk without a transfer, so that no look-up finds it."""
        evicted: list[OffloadKey] = []
        for block in [block for block, busy in self._busy_slots.items() if busy]:
            evicted.extend(self._evict_idle(block))
        self._tell_evicted(evicted)
        if self.ghost is not None:
            self.ghost.clear()

    def settle(self, reset: int) -> None:
        """The workers have flushed the transfers in flight at reset number ``reset`` and before."""
        for chunk_id in [chunk for chunk, number in self._settling.items() if number <= reset]:
            del self._settling[chunk_id]
            self._release_slot(chunk_id)

    def has_pending_work(self) -> bool:
        """An idle engine must step again, or the flush would wait for the next request."""
        return bool(self._settling) or bool(super().has_pending_work())

    def _set_capacity(self) -> None:
        # The stock bookkeeping sees every lent slot as allocated once: the free slots are exactly
        # its free list, so none of its arithmetic has to change.
        per_block = self._layout.chunks_per_block if self._layout is not None else 0
        slots = len(self._lent) * per_block
        self._num_chunks = slots
        self._num_allocated_chunks = slots
        self._policy.cache_capacity = slots

    def _evict_idle(self, block: int) -> list[OffloadKey]:
        evicted = []
        for chunk_id in self.layout.chunk_ids(block):
            key = self._key_of_chunk.get(chunk_id)
            if key is None:
                continue
            chunk = self._policy.get(key)
            if chunk is None or chunk.ref_cnt != 0:
                continue
            self._policy.remove(key)
            self._num_evictable_cache_chunks -= 1
            self._free_chunk(chunk)
            evicted.append(key)
        return evicted

    def _tell_evicted(self, keys: list[OffloadKey]) -> None:
        if keys and self.events is not None:
            self.events.append(OffloadingEvent(keys=keys, medium=self.medium, removed=True))

    def _release_slot(self, chunk_id: int) -> None:
        """A slot is no longer busy: free it, or end the draining of its block."""
        block, _ = self.layout.locate(chunk_id)
        self._busy_slots[block] -= 1
        if block in self._lent:
            self._free_list.put(block, chunk_id)
            if not self._busy_slots[block]:
                self._empty[block] = None
        elif not self._busy_slots[block]:
            self._drained.append(block)

    def _trim_draining(self, keys: Collection[OffloadKey]) -> None:
        if not self._draining:
            return
        blocks = set()
        for key in keys:
            chunk = self._policy.get(key)
            if chunk is not None:
                blocks.add(self.layout.locate(int(chunk.chunk_id))[0])
        evicted: list[OffloadKey] = []
        for block in blocks & self._draining:
            evicted.extend(self._evict_idle(block))
        self._tell_evicted(evicted)

    def _touch_block(self, chunk_id: int) -> None:
        block, _ = self.layout.locate(chunk_id)
        if block in self._lent:
            self._lent.move_to_end(block)

    # --- the stock manager's hooks -------------------------------------------------

    def _allocate_chunks(self, keys: list[OffloadKey]) -> list[ChunkStatus]:
        chunks = []
        for key in keys:
            chunk_id = self._free_list.take()
            block, _ = self.layout.locate(chunk_id)
            self._key_of_chunk[chunk_id] = key
            if self.ghost is not None:
                self.ghost.restored(get_offload_block_hash(key))
            self._busy_slots[block] += 1
            self._empty.pop(block, None)
            self._lent.move_to_end(block)
            chunks.append(ChunkStatus(chunk_id))
        return chunks

    def _free_chunk(self, chunk: ChunkStatus) -> None:
        chunk_id = int(chunk.chunk_id)
        key = self._key_of_chunk.pop(chunk_id)
        # A failed store leaves no chunk that more room would have kept.
        if self.ghost is not None and chunk.is_ready:
            self.ghost.evicted(get_offload_block_hash(key))
        self._release_slot(chunk_id)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        chunk = self._policy.get(key)
        if chunk is not None:
            self._touch_block(int(chunk.chunk_id))
        result = super().lookup(key, req_context)
        if result is LookupResult.HIT:
            self.found.append(key)
        return result

    def prefix(self, keys: Iterable[OffloadKey]) -> int | None:
        """As ``lookup`` of each key up to the first miss: how many there are, ``None`` where one
        is still being stored."""
        get, lent, found = self._policy.get, self._lent, self.found
        per_block = self.layout.chunks_per_block
        hits, storing, last = 0, False, -1
        for key in keys:
            chunk = get(key)
            if chunk is None:
                break
            hits += 1
            block = chunk.chunk_id // per_block
            if block != last:
                last = block
                if block in lent:
                    lent.move_to_end(block)
            if chunk.is_ready:
                found.append(key)
            else:
                storing = True
        return None if storing else hits

    def retain(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Keep chunks that were found as if they were being loaded, until ``release``."""
        super().prepare_load(keys, req_context)

    def release(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """End ``retain``."""
        self.complete_load(keys, req_context)

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        spec = super().prepare_load(keys, req_context)
        for chunk_id in spec.block_ids.tolist():
            self._touch_block(chunk_id)
        return spec

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        super().complete_load(keys, req_context)
        self._trim_draining(keys)

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        super().complete_store(keys, req_context, success)
        self._trim_draining(keys)

    def reset_cache(self) -> None:
        """Forget every chunk. Slots with a transfer in flight settle first."""
        self.resets += 1
        for chunk_id, key in self._key_of_chunk.items():
            chunk = self._policy.get(key)
            if chunk is None or chunk.ref_cnt != 0:
                self._settling[chunk_id] = self.resets
        super().reset_cache()
        if self.ghost is not None:
            self.ghost.clear()
        self._key_of_chunk.clear()
        self._busy_slots = dict.fromkeys(self._busy_slots, 0)
        for chunk_id in self._settling:
            self._busy_slots[self.layout.locate(chunk_id)[0]] += 1
        self._empty = OrderedDict.fromkeys(
            block for block in self._lent if not self._busy_slots[block]
        )
        for block in self._lent:
            slots = self.layout.chunk_ids(block)
            self._free_list.add(block, (slot for slot in slots if slot not in self._settling))
        self._drained = [block for block in self._draining if not self._busy_slots[block]]
        self._set_capacity()


class LentOffloadingSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM's CPU offloading spec with a manager that starts empty and lives on lent blocks."""

    def get_manager(self) -> OffloadingManager:
        fresh = self._manager is None
        manager = super().get_manager()
        if fresh:
            if self.blocks_per_chunk != 1:
                raise ValueError(
                    f"blocks_per_chunk is {self.blocks_per_chunk}; lent host blocks hold "
                    "chunks of one block: leave blocks_per_chunk and block_size out"
                )
            manager.__class__ = LentOffloadingManager
            cast(LentOffloadingManager, manager).start_unlent()
        return manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        raise NotImplementedError(
            "lent host blocks are copied by the node's own worker; name that node's spec"
        )


class FencedOffloadingScheduler(OffloadingConnectorScheduler):  # type: ignore[misc]
    """Tells vLLM of every GPU block that a pass has handed out, before vLLM decides what to flush.

    Retains the chunks of a load that the scheduler has put off, before a store of the same pass
    may evict them, until the load begins or its request ends.
    """

    _device_groups: tuple[int, ...]
    asks_whole_prefixes = False
    """Whether the manager is asked once for a prefix, and not once for each of its chunks."""

    def start_fencing(self, device_groups: tuple[int, ...]) -> None:
        self._device_groups = device_groups
        self._found: dict[str, tuple[Any, tuple[OffloadKey, ...]]] = {}
        self._retained: dict[str, tuple[OffloadKey, ...]] = {}

    def get_num_new_matched_tokens(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        manager = cast(LentOffloadingManager, self.manager)
        manager.found.clear()
        result = super().get_num_new_matched_tokens(request, *args, **kwargs)
        self._found[request.request_id] = (request, tuple(manager.found))
        return result

    def _maximal_prefix_lookup(self, keys: Any, *args: Any, **kwargs: Any) -> int | None:
        if self.asks_whole_prefixes and not self._events_tracker.self_describing_enabled:
            return cast(LentOffloadingManager, self.manager).prefix(keys)
        found: int | None = super()._maximal_prefix_lookup(keys, *args, **kwargs)
        return found

    def update_state_after_alloc(self, request: Any, *args: Any, **kwargs: Any) -> None:
        self._found.pop(request.request_id, None)
        super().update_state_after_alloc(request, *args, **kwargs)
        if request.request_id in self._retained:
            self._release(request.request_id)
            unlock_manager(self)

    def request_finished(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._release(request.request_id)
        return super().request_finished(request, *args, **kwargs)

    def reset_cache(self) -> None:
        for request_id in list(self._retained):
            self._release(request_id)
        super().reset_cache()

    def _retain_put_off(self) -> None:
        manager = cast(LentOffloadingManager, self.manager)
        for request_id, (request, keys) in self._found.items():
            if keys and request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                manager.retain(keys, self._req_status[request_id].req_context)
                self._retained[request_id] = keys
        self._found.clear()

    def _release(self, request_id: str) -> None:
        keys = self._retained.pop(request_id, None)
        if keys is not None:
            manager = cast(LentOffloadingManager, self.manager)
            manager.release(keys, self._req_status[request_id].req_context)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self._retain_put_off()
        for groups in _new_blocks(scheduler_output):
            for group in self._device_groups:
                self._current_batch_allocated_block_ids.update(groups[group])
        # Group tables are padded with the null block.
        self._current_batch_allocated_block_ids.discard(0)
        return super().build_connector_meta(scheduler_output)


def fence_stores(offloading_scheduler: Any, kv_cache_config: Any) -> None:
    """Re-class vLLM's offloading scheduler. Host groups number other blocks and are omitted."""
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


def find_offloading_scheduler(connector: Any) -> Any:
    """The scheduler half of vLLM's offloading connector. Raises ``TypeError`` without one."""
    children = getattr(connector, "sub_connectors", [connector])
    for child in children:
        if isinstance(child, OffloadingConnector) and child.connector_scheduler is not None:
            return child.connector_scheduler
    raise TypeError("no OffloadingConnector among the configured KV connectors")


def find_offload_manager(connector: Any) -> LentOffloadingManager:
    """The offloading manager of the scheduler's connector. Raises ``TypeError`` for another."""
    manager = find_offloading_scheduler(connector).manager
    if isinstance(manager, LentOffloadingManager):
        return manager
    raise TypeError(
        f"the offloading connector uses {type(manager).__name__}; its spec_name must "
        "be one of hisparsed's"
    )
