"""The offload pool that owns no memory: vLLM's CPU offloading manager over lent host blocks.

``LentOffloadingSpec`` is named in the connector's ``spec_name``. It lets vLLM build its own
manager, then re-classes it (the constructor differs between versions). Capacity comes and
goes in whole host blocks, through ``lend`` and ``recall``; the ledger decides how many.
Not thread-safe: every call is made on the engine thread between or inside scheduler steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import cast

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    LoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadingManager,
    OffloadingWorker,
    OffloadKey,
    ReqContext,
)
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from hisparsed.engine.chunks import ChunkLayout


class LentOffloadingManager(CPUOffloadingManager):  # type: ignore[misc]
    """Chunks live in the slots of lent host blocks; a chunk id names block and slot.

    A recalled block gives up its idle chunks at once; with loads or stores in flight it is
    *draining*: its slots are no longer handed out and it is returned when the last ends.
    """

    _layout: ChunkLayout | None

    def start_unlent(self) -> None:
        """Turn a freshly built stock manager into one with no capacity."""
        self._layout = None
        self._lent: dict[int, int] = {}  # block -> recency stamp
        self._busy_slots: dict[int, int] = {}  # block -> slots that hold a chunk
        self._key_of_chunk: dict[int, OffloadKey] = {}
        self._draining: set[int] = set()
        self._drained: list[int] = []
        self._clock = 0
        self._free_list.clear()
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
        return len(self._lent)

    @property
    def draining_blocks(self) -> int:
        return len(self._draining)

    @property
    def stored_chunks(self) -> int:
        """Chunks with content or a store in flight."""
        return len(self._key_of_chunk)

    @property
    def in_flight_chunks(self) -> int:
        """Chunks that a load or store is using now."""
        return len(self._key_of_chunk) - int(self._num_evictable_cache_chunks)

    def lend(self, block_ids: Iterable[int]) -> None:
        """Add host blocks; their slots are free at once."""
        blocks = list(block_ids)
        for block in blocks:
            if block in self._lent:
                raise RuntimeError(f"host block {block} is lent already")
            self._lent[block] = self._clock
            self._busy_slots[block] = 0
        self._free_list[:0] = self._slots_to_pop(blocks)
        self._set_capacity()

    def recall(self, count: int) -> list[int]:
        """Give back up to ``count`` blocks, coldest first; returns those free right now.

        Blocks with a transfer in flight start draining and count towards ``count``; they
        are handed out later by ``take_drained``.
        """
        candidates = [block for block in self._lent if block not in self._draining]
        candidates.sort(key=lambda block: (self._busy_slots[block] > 0, self._lent[block]))
        victims = candidates[:count]
        self._draining.update(victims)
        condemned = set(victims)
        self._free_list[:] = [
            chunk for chunk in self._free_list if self.layout.locate(chunk)[0] not in condemned
        ]
        evicted: list[OffloadKey] = []
        for block in victims:
            evicted.extend(self._evict_idle(block))
            if not self._busy_slots[block]:
                self._drained.append(block)
        if evicted and self.events is not None:
            self.events.append(OffloadingEvent(keys=evicted, medium=self.medium, removed=True))
        return self.take_drained()

    def take_drained(self) -> list[int]:
        """Blocks whose draining has ended since the last call; no longer ours."""
        drained, self._drained = self._drained, []
        for block in drained:
            self._draining.discard(block)
            del self._lent[block]
            del self._busy_slots[block]
        if drained:
            self._set_capacity()
        return drained

    def _slots_to_pop(self, blocks: list[int]) -> list[int]:
        # Popped from the end: slots fill in ascending order, block by block.
        return [
            chunk for block in reversed(blocks) for chunk in reversed(self.layout.chunk_ids(block))
        ]

    def _set_capacity(self) -> None:
        # The stock bookkeeping sees every lent slot as allocated once: what is free is
        # exactly its free list, so none of its own arithmetic has to change.
        usable = len(self._lent) - len(self._draining)
        slots = usable * (self._layout.chunks_per_block if self._layout is not None else 0)
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
            self._release_slot(chunk_id)
            evicted.append(key)
        return evicted

    def _release_slot(self, chunk_id: int) -> int:
        block, _ = self.layout.locate(chunk_id)
        del self._key_of_chunk[chunk_id]
        self._busy_slots[block] -= 1
        return block

    def _trim_draining(self, keys: Collection[OffloadKey]) -> None:
        if not self._draining:
            return
        blocks = set()
        for key in keys:
            chunk = self._policy.get(key)
            if chunk is not None:
                blocks.add(self.layout.locate(int(chunk.chunk_id))[0])
        for block in blocks & self._draining:
            self._evict_idle(block)
            if not self._busy_slots[block] and block not in self._drained:
                self._drained.append(block)

    def _touch_block(self, chunk_id: int) -> None:
        self._clock += 1
        block, _ = self.layout.locate(chunk_id)
        if block in self._lent:
            self._lent[block] = self._clock

    # --- the stock manager's hooks -------------------------------------------------

    def _get_num_free_chunks(self) -> int:
        return len(self._free_list)

    def _allocate_chunks(self, keys: list[OffloadKey]) -> list[ChunkStatus]:
        chunks = []
        for key in keys:
            chunk_id = self._free_list.pop()
            self._key_of_chunk[chunk_id] = key
            self._busy_slots[self.layout.locate(chunk_id)[0]] += 1
            self._touch_block(chunk_id)
            chunks.append(ChunkStatus(chunk_id))
        return chunks

    def _free_chunk(self, chunk: ChunkStatus) -> None:
        chunk_id = int(chunk.chunk_id)
        block = self._release_slot(chunk_id)
        if block not in self._draining:
            self._free_list.append(chunk_id)
        elif not self._busy_slots[block] and block not in self._drained:
            self._drained.append(block)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        chunk = self._policy.get(key)
        if chunk is not None:
            self._touch_block(int(chunk.chunk_id))
        return super().lookup(key, req_context)

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
        super().reset_cache()
        self._key_of_chunk.clear()
        self._busy_slots = dict.fromkeys(self._lent, 0)
        self._drained = list(self._draining)
        usable = [block for block in self._lent if block not in self._draining]
        self._free_list[:] = self._slots_to_pop(usable)
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
