"""A node of several ranks without a GPU: vLLM's offloading workers over slow copies.

Scheduler's side: our manager and vLLM's own counting of completed jobs. Each rank: its own "GPU"
memory, its own mapping of the host pool, vLLM's ``OffloadingConnectorWorker`` and HiSparse's writer
with its own stream and rows that wait for the next step. The test makes the ranks step.

Copies replace CUDA streams and run on real memory when the test starts them. Bytes are read and
written when a copy runs, not when it is submitted, so what is not ordered by a wait goes wrong here
as it would on a device.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from hisparsed.engine.cuda.copies import (
    Addresses,
    ChunkRanges,
    DeviceRun,
    HostSlices,
    join_neighbours,
)
from hisparsed.engine.cuda.offload import CudaChunkWorker, Lanes
from hisparsed.engine.host.chunks import ChunkLayout


@dataclass
class Stream:
    """Work in order. An entry is (number, what to do)."""

    queued: deque[tuple[int, Callable[[], None]]] = field(default_factory=deque)
    given: int = 0
    ran: int = 0

    def give(self, work: Callable[[], None]) -> int:
        self.given += 1
        self.queued.append((self.given, work))
        return self.given

    def run_one(self) -> None:
        number, work = self.queued.popleft()
        work()
        self.ran = number

    def run_up_to(self, number: int) -> None:
        while self.ran < number:
            self.run_one()


@dataclass
class SlowCopy:
    stream: Stream
    number: int

    def done(self) -> bool:
        return self.stream.ran >= self.number

    def wait(self) -> None:
        self.stream.run_up_to(self.number)

    def seconds(self) -> float:
        return 0.001


@dataclass
class SlowLane:
    """A lane that waits for ``others`` as they are at submission, as ``CudaLane`` does."""

    stream: Stream
    others: Sequence[Stream] = ()
    batches: list[tuple[Addresses, Addresses, Addresses]] = field(default_factory=list)

    def submit(self, source: Addresses, target: Addresses, lengths: Addresses) -> SlowCopy:
        self.batches.append((source, target, lengths))
        waits = [(other, other.given) for other in self.others]

        def work() -> None:
            for other, number in waits:
                other.run_up_to(number)
            for start, end, length in zip(source, target, lengths, strict=True):
                ctypes.memmove(int(end), int(start), int(length))

        return SlowCopy(self.stream, self.stream.give(work))


def one_stream_lane() -> SlowLane:
    return SlowLane(Stream())


LAYOUT = ChunkLayout(layers=3, slice_bytes=64, chunk_bytes=40)
PAGES = (24, 16)
"""Bytes of the two indexer pages that make a chunk."""
PAGE_OFFSETS = (0, 30)
GPU_STRIDE = 52


@dataclass
class TenantWrite:
    """HiSparse mirrors ``content`` into a host block; ``late``: only the next step's start puts
    it on the stream, as vLLM does with rows of draft layers."""

    block: int
    content: bytes
    late: bool


@dataclass
class Step:
    """The message of one scheduling pass to every rank."""

    offloading: Any
    tenant: list[TenantWrite] = field(default_factory=list)
    gpu_after_flush: dict[int, bytes] = field(default_factory=dict)
    """GPU blocks that the step writes again, once what it flushes has been flushed."""


class Rank:
    def __init__(
        self, index: int, memory: mmap.mmap, host_blocks: int, gpu_blocks: int, *, writes: bool
    ) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
            OffloadingConnectorWorker,
        )

        self._host = np.frombuffer(memory, dtype=np.uint8)
        self.gpu = np.full(gpu_blocks * GPU_STRIDE, 0x55, dtype=np.uint8)
        base = int(self._host.ctypes.data)
        layer_bytes = host_blocks * LAYOUT.slice_bytes
        self.layers = tuple(base + layer * layer_bytes for layer in range(LAYOUT.layers))
        start = int(self.gpu.ctypes.data)
        runs = join_neighbours(
            DeviceRun(start + offset, GPU_STRIDE, length)
            for offset, length in zip(PAGE_OFFSETS, PAGES, strict=True)
        )
        self.tenant = Stream()
        self.late: list[TenantWrite] = []
        self.store = SlowLane(Stream(), others=(self.tenant,))
        self.load = SlowLane(Stream())
        self.expedited = SlowLane(Stream())
        self.worker = CudaChunkWorker(
            ChunkRanges(
                LAYOUT, HostSlices(self.layers, LAYOUT.slice_bytes, host_blocks), runs, gpu_blocks
            ),
            Lanes(self.store, self.load, self.expedited),
            writes=writes,
            before_store=self.put_late_writes_on_stream,
        )
        self.writes = writes
        spec = SimpleNamespace(
            replicated_layout=False,
            config=SimpleNamespace(canonical_layout=False, parallel=SimpleNamespace(rank=index)),
        )
        self.connector = OffloadingConnectorWorker(spec, None, None)
        self.connector.worker = self.worker
        self.inbox: deque[Step] = deque()
        self.outbox: deque[Any] = deque()

    # --- memory -----------------------------------------------------------------------

    def page(self, block: int) -> bytes:
        start = block * GPU_STRIDE
        return b"".join(
            self.gpu[start + offset : start + offset + length].tobytes()
            for offset, length in zip(PAGE_OFFSETS, PAGES, strict=True)
        )

    def write_page(self, block: int, content: bytes) -> None:
        done = 0
        for offset, length in zip(PAGE_OFFSETS, PAGES, strict=True):
            start = block * GPU_STRIDE + offset
            self.gpu[start : start + length] = np.frombuffer(
                content[done : done + length], dtype=np.uint8
            )
            done += length

    def host_block(self, block: int) -> bytes:
        return b"".join(
            ctypes.string_at(address + block * LAYOUT.slice_bytes, LAYOUT.slice_bytes)
            for address in self.layers
        )

    def _write_host_block(self, write: TenantWrite) -> None:
        for layer, address in enumerate(self.layers):
            size = LAYOUT.slice_bytes
            ctypes.memmove(address + write.block * size, write.content[layer * size :][:size], size)

    # --- one step, in the order of vLLM's GPU worker ----------------------------------

    def put_late_writes_on_stream(self) -> None:
        late, self.late = self.late, []
        for write in late:
            self.tenant.give(partial(self._write_host_block, write))

    def take_step(self) -> None:
        step = self.inbox.popleft()
        self.connector.handle_preemptions(step.offloading)
        self.put_late_writes_on_stream()
        self.connector.start_kv_transfers(step.offloading)
        for block, content in step.gpu_after_flush.items():
            self.write_page(block, content)
        if self.writes:
            for write in step.tenant:
                if write.late:
                    self.late.append(write)
                else:
                    self.tenant.give(partial(self._write_host_block, write))
        self.connector.prepare_store_kv(step.offloading)
        _, received = self.connector.get_finished(set())
        self.outbox.append((self.connector.build_connector_worker_meta(), received))

    @property
    def streams(self) -> list[Stream]:
        return [self.tenant, self.store.stream, self.load.stream, self.expedited.stream]


class Node:
    """``shared``: one pool that all ranks map, written by the first; else one pool per rank."""

    def __init__(self, ranks: int, host_blocks: int, gpu_blocks: int, *, shared: bool) -> None:
        from vllm.v1.kv_offload.base import ReqContext
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        from hisparsed.engine.host.offload import LentOffloadingManager

        size = -(-host_blocks * LAYOUT.block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        pools = [os.memfd_create("host pool") for _ in range(1 if shared else ranks)]
        for pool in pools:
            os.ftruncate(pool, size)
        self.ranks = [
            Rank(
                index,
                mmap.mmap(pools[0 if shared else index], size),
                host_blocks,
                gpu_blocks,
                writes=not shared or index == 0,
            )
            for index in range(ranks)
        ]
        for pool in pools:
            os.close(pool)
        manager: Any = CPUOffloadingManager(num_chunks=0)
        manager.__class__ = LentOffloadingManager
        manager.start_unlent()
        manager.bind_layout(LAYOUT)
        self.manager: LentOffloadingManager = manager
        self.context = ReqContext("request")
        self._request = SimpleNamespace(
            req_context=self.context,
            transfer_jobs=set(),
            finished_signaled=False,
            req=SimpleNamespace(is_finished=lambda: False),
        )
        self.jobs: dict[int, Any] = {}
        self._next_job = 0
        self._load_jobs: dict[int, Any] = {}
        self._store_jobs: dict[int, Any] = {}
        self._flush: set[int] = set()
        self._tenant: list[TenantWrite] = []
        self._gpu_after_flush: dict[int, bytes] = {}
        self.steps_out = 0

    # --- the scheduler's side ----------------------------------------------------------

    def key(self, index: int) -> Any:
        from vllm.v1.kv_offload.base import make_offload_key

        return make_offload_key(index.to_bytes(32, "big"), 1)

    def loadable(self, key: int) -> bool:
        return bool(self.manager.lookup(self.key(key), self.context).name == "HIT")

    def store(self, key: int, gpu_block: int) -> int | None:
        """Job id; None where the manager has it, is storing it or has no room."""
        output = self.manager.prepare_store([self.key(key)], self.context)
        if output is None or not output.keys_to_store:
            return None
        job = self._open(output.keys_to_store, is_store=True)
        self._store_jobs[job] = self._transfer(self._gpu(gpu_block), output.store_spec)
        return job

    def load(self, key: int, gpu_block: int) -> int:
        spec = self.manager.prepare_load([self.key(key)], self.context)
        job = self._open([self.key(key)], is_store=False)
        self._load_jobs[job] = self._transfer(spec, self._gpu(gpu_block))
        return job

    def flush(self, job: int, gpu_block: int, content: bytes) -> None:
        """The next step flushes the job and then writes its GPU block again."""
        self._flush.add(job)
        self._gpu_after_flush[gpu_block] = content

    def tenant_writes(self, write: TenantWrite) -> None:
        """Of the writes of one step into one block the last counts."""
        self._tenant = [other for other in self._tenant if other.block != write.block] + [write]

    def send_step(self) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
            OffloadingConnectorMetadata,
        )

        for rank in self.ranks:
            metadata = OffloadingConnectorMetadata(
                load_jobs=dict(self._load_jobs),
                store_jobs=dict(self._store_jobs),
                jobs_to_flush=set(self._flush),
            )
            rank.inbox.append(Step(metadata, list(self._tenant), dict(self._gpu_after_flush)))
        self._load_jobs, self._store_jobs, self._flush = {}, {}, set()
        self._tenant, self._gpu_after_flush = [], {}
        self.steps_out += 1

    def take_output(self) -> set[int]:
        """Output of the oldest step, once every rank has it: jobs that are complete now."""
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
            OffloadingConnectorScheduler,
        )

        if not self.steps_out or not all(rank.outbox for rank in self.ranks):
            return set()
        merged = None
        for rank in self.ranks:
            metadata, _ = rank.outbox.popleft()
            if metadata is not None:
                merged = metadata if merged is None else merged.aggregate(metadata)
        before = set(self.jobs)
        scheduler = object.__new__(OffloadingConnectorScheduler)
        vars(scheduler).update(
            _jobs=self.jobs,
            _stale_job_threshold=0,
            _req_status={"request": self._request},
            manager=self.manager,
            _chunks_being_loaded=set(),
            _block_id_to_pending_jobs={},
            _connector_stats=SimpleNamespace(aggregate=lambda _: None),
            # Since 0.33; only the test calls this manager.
            _manager_locked=nullcontext,
        )
        scheduler.update_connector_output(SimpleNamespace(kv_connector_worker_meta=merged))
        self.steps_out -= 1
        return before - set(self.jobs)

    def run_everything(self) -> set[int]:
        """Ranks and copies catch up; returns the jobs that have ended by then."""
        ended: set[int] = set()
        for _ in range(4):
            self.send_step()
            for rank in self.ranks:
                while rank.inbox:
                    rank.take_step()
                for stream in rank.streams:
                    stream.run_up_to(stream.given)
            while self.steps_out:
                ended |= self.take_output()
        return ended

    def _open(self, keys: Any, *, is_store: bool) -> int:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
            TransferJobStatus,
        )

        job = self._next_job
        self._next_job += 1
        self.jobs[job] = TransferJobStatus(
            req_id="request",
            pending_count=len(self.ranks),
            keys=set(keys),
            is_store=is_store,
            deferred_fence_block_ids=None,
            fenced_block_ids=None,
        )
        self._request.transfer_jobs.add(job)
        return job

    def _gpu(self, block: int) -> Any:
        from vllm.v1.kv_offload.base import GPULoadStoreSpec

        return GPULoadStoreSpec([block], group_sizes=[1], block_indices=[0])

    def _transfer(self, source: Any, target: Any) -> Any:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob

        return TransferJob(req_id="request", src_spec=source, dst_spec=target)


def content(seed: int, size: int = LAYOUT.chunk_bytes) -> bytes:
    """Bytes that show where they come from."""
    return random.Random(seed).randbytes(size)


def write_everywhere(node: Node, block: int, page: bytes) -> None:
    """The indexer computes the same on every rank."""
    for rank in node.ranks:
        rank.write_page(block, page)
