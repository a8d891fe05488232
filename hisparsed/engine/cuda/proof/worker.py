"""One worker's hot buffers in miniature: vLLM's own runtimes over scratch memory.

``Pool`` is the host memory that both sides read, ``Side`` one worker: vLLM's runtimes as they
are, or with our resolver installed. Two index groups share a hot cache group. A side makes all of
its tensors once, so that its step can be recorded as a graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.v1.hisparse.runtime import (
    HiSparseCacheHandle,
    HiSparseRuntime,
    ResolvedHiSparseConfig,
)

from hisparsed.engine.cuda.proof.compare import Reads
from hisparsed.engine.cuda.proof.work import RESIDENT_PAGES, SECOND_GROUP_LAYERS, Work, WorkStep
from hisparsed.engine.cuda.residency.runtime import install
from hisparsed.engine.cuda.residency.worker import SentLeases, WorkerResidency

_GARBAGE = 0xA5
"""Bytes that other requests write into blocks that were given back."""


class Pool:
    """Host rows by layer, pinned on a GPU node, and the same bytes on the device."""

    def __init__(self, work: Work, device: torch.device, *, seed: int) -> None:
        sizes = work.sizes
        rows = work.host_blocks * sizes.block_tokens
        generator = torch.Generator().manual_seed(seed)
        self.work = work
        self.device = device
        self.layers: list[torch.Tensor] = []
        for _ in range(work.layers):
            layer = torch.empty(
                (rows, sizes.row_bytes), dtype=torch.uint8, pin_memory=device.type == "cuda"
            )
            layer.random_(0, 256, generator=generator)
            self.layers.append(layer)
        self.right = [layer.to(device, copy=True) for layer in self.layers]
        self.source = torch.zeros(
            (work.requests, work.table_pages), dtype=torch.int32, device=device
        )
        for request in range(work.requests):
            blocks = self._blocks(request, generator)
            self.source[request, : len(blocks)] = blocks.to(device)
        self._generator = generator

    def _blocks(self, request: int, generator: torch.Generator) -> torch.Tensor:
        """Shared blocks in its own order, then one that no other request has."""
        pages = -(-self.work.tokens(request) // self.work.sizes.block_tokens)
        shared = 1 + torch.randperm(self.work.shared_pages, generator=generator)
        own = torch.tensor([1 + self.work.shared_pages + request])
        return torch.cat((shared[: pages - 1], own)).to(torch.int32)

    def rewrite(self, request: int, count: int) -> torch.Tensor:
        """New bytes in the last ``count`` rows of a request, as rejected drafts leave; the host
        rows, int64 [count]."""
        size = self.work.sizes.block_tokens
        end = self.work.tokens(request)
        first = max((end - 1) // size * size, end - count)
        position = torch.arange(first, end)
        blocks = self.source[request].cpu().long()
        rows = blocks[position // size] * size + position % size
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for layer, right in zip(self.layers, self.right, strict=True):
            new = torch.randint(
                0, 256, (len(rows), layer.shape[1]), generator=self._generator
            ).byte()
            layer[rows] = new
            right[rows.to(self.device)] = new.to(self.device)
        return rows.to(self.device)

    def reads(self, layer: int, step: WorkStep, rows: slice) -> Reads:
        """The rows of ``layer`` that attention must read, for some of a step's decode rows."""
        size, topk = self.work.sizes.block_tokens, step.topk[rows].long()
        request = torch.arange(rows.start, rows.stop, device=self.device)
        tables = self.source[request // self.work.sizes.query_len].long()
        near = topk.clamp(min=0)
        host = torch.gather(tables, 1, near // size) * size + near % size
        valid = topk >= 0
        return Reads(self.right[layer][host], valid, valid.sum(dim=1, dtype=torch.int32))


class Side:
    """One worker. ``ours``: with hisparsed's resolver, whose leases then move."""

    def __init__(self, pool: Pool, device: torch.device, *, ours: bool) -> None:
        work = pool.work
        self._work, self._pool, self._device = work, pool, device
        self._slab = torch.zeros(work.slab_bytes, dtype=torch.uint8, device=device)
        blocks = work.most_blocks if ours else work.start_blocks
        self._hot = self._ints(work.requests, blocks)
        self._hot_by_state = self._ints(work.requests, blocks)
        self._resident = self._ints(work.requests, work.table_pages)
        self._states = self._ints(work.requests) - 1
        order = torch.Generator().manual_seed(work.requests)
        self.state_of = torch.randperm(work.requests, generator=order).tolist()
        self._request_ids = torch.arange(work.rows, dtype=torch.int32, device=device).div_(
            work.sizes.query_len, rounding_mode="floor"
        )
        self._topk = self._ints(work.rows, work.sizes.topk) - 1
        self._real = torch.zeros(1, dtype=torch.int64, device=device)
        self._found: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._graph: Any = None
        self.handles = self._make_handles(blocks)
        self._lease(work.start_blocks)
        self._make_resident()
        self.node: WorkerResidency | None = None
        if ours:
            self._sent = SentLeases()
            self._blocks = [work.start_blocks] * work.requests
            # The lengths sent to the node, which are less if a request has grown since its last
            # step.
            self._told: dict[int, int] = {}
            self.node = install(self.handles, [0] * len(self.handles))

    def _ints(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self._device)

    def _make_handles(self, blocks: int) -> list[Any]:
        work, sizes = self._work, self._work.sizes
        config = ResolvedHiSparseConfig(
            top_k=sizes.topk,
            device_buffer_size=blocks * sizes.block_tokens,
            max_union_rows=sizes.query_len * sizes.topk,
        )
        handles: list[Any] = []
        for layer in range(work.layers):
            leads = layer in (0, work.layers - SECOND_GROUP_LAYERS)
            runtime = HiSparseRuntime(
                config=config,
                max_num_reqs=work.requests,
                row_width=sizes.row_bytes,
                kv_dtype=torch.uint8,
                device=self._device,
                max_swap_rows=work.rows,
                index_group=None if leads else handles[0].runtime.index_group,
            )
            where = {
                "byte_offset": layer * work.page_bytes,
                "block_stride": work.layers * work.page_bytes,
                "num_blocks": work.slab_blocks,
                "block_size": sizes.block_tokens,
            }
            runtime.bind_hot_cache(self._slab, **where, block_table=self._hot)
            host = self._pool.layers[layer].view(-1, sizes.block_tokens, sizes.row_bytes)
            runtime.bind_source_cache(host, registered_host_pool=host)
            runtime.request_state_indices = self._states
            handle = HiSparseCacheHandle(runtime)
            handle.bind_cache(
                self._slab,
                **where,
                block_table=self._resident,
                slot_mapping=torch.zeros(1, dtype=torch.int64, device=self._device),
            )
            handle.source_block_table = self._pool.source
            handle.decode_batch = sizes.query_len == 1
            if hasattr(handle, "residency"):
                # Tables by state row, which 0.31 has by batch row.
                handle.residency = self._resident
            handles.append(handle)
        self._by_state = hasattr(handles[0], "residency")
        return handles

    def _hot_blocks(self, request: int, first: int, end: int) -> torch.Tensor:
        """GPU blocks of a lease: its own range of the slab, so growing takes them again."""
        start = 1 + request * (self._work.most_blocks + RESIDENT_PAGES)
        return torch.arange(start + first, start + end, dtype=torch.int32, device=self._device)

    def _lease(self, blocks: int) -> None:
        for request in range(self._work.requests):
            table = self._hot_blocks(request, 0, blocks)
            self._hot[request, :blocks] = table
            self._hot_by_state[self.state_of[request], :blocks] = table

    def _make_resident(self) -> None:
        """Some pages of each request are also on the GPU: the first, and some in its middle."""
        work = self._work
        slab = self._slab.view(work.slab_blocks, work.layers, work.page_bytes)
        source = self._pool.source.cpu()
        for request in range(work.requests):
            last = (work.tokens(request) - 1) // work.sizes.block_tokens
            pages = sorted({last * part // RESIDENT_PAGES for part in range(RESIDENT_PAGES)})
            first = 1 + request * (work.most_blocks + RESIDENT_PAGES) + work.most_blocks
            row = self.state_of[request] if self._by_state else request
            for index, page in enumerate(page for page in pages if page < last):
                self._resident[row, page] = first + index
                rows = int(source[request, page]) * work.sizes.block_tokens
                for layer, right in enumerate(self._pool.right):
                    held = right[rows : rows + work.sizes.block_tokens]
                    slab[first + index, layer] = held.reshape(-1)

    # --- one step -----------------------------------------------------------------------

    def begin(self, step: WorkStep) -> None:
        """Give the step to the tensors that a recorded step reads."""
        sizes = self._work.sizes
        states = torch.tensor(self.state_of[: step.requests], dtype=torch.int32)
        self._states.fill_(-1)
        self._states[: step.requests] = states.to(self._device)
        self._topk.copy_(step.topk)
        self._real.fill_(step.requests * sizes.query_len)
        # Padding rows name request 0, as in a captured graph.
        request = torch.arange(self._work.rows, device=self._device) // sizes.query_len
        self._request_ids.copy_(torch.where(request < step.requests, request, 0))
        if self.node is not None:
            names = [_name(one) for one in range(step.requests)]
            updates = self._sent.updates(
                names,
                fresh=[name for name in names if int(name) not in self._told],
                ended=(),
                held=lambda name: (self._blocks[int(name)],),
            )
            self._told |= {one: self._blocks[one] for one in range(step.requests)}
            self.node.before_forward(updates, names, self._states[: step.requests].long())

    def run(self) -> None:
        """All layers, one after the other, or the replay of that."""
        if self._graph is not None:
            self._graph.replay()
            return
        for handle in self.handles:
            handle.runtime.begin_forward()
        self._found = [self._swap_in(handle) for handle in self.handles]

    def run_first_group(self, rows: int) -> None:
        """The first ``rows`` decode rows on the layers of the first group, never replayed."""
        for handle in self.handles[: -SECOND_GROUP_LAYERS or None]:
            handle.runtime.begin_forward()
            self._swap_in(handle, rows)

    def record(self) -> None:
        """Record ``run`` as a graph; it has run before."""
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run()
        self._graph = graph

    def _swap_in(self, handle: Any, rows: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        found: tuple[torch.Tensor, torch.Tensor] = handle.swap_in(
            self._request_ids[:rows],
            self._pool.source,
            self._topk[:rows],
            block_size=self._work.sizes.block_tokens,
            num_valid_rows=self._real,
            return_valid_counts=True,
        )
        return found

    def reads(self, layer: int, rows: slice) -> Reads:
        """The rows of ``layer`` that attention reads now, for some of the step's decode rows."""
        indices, counts = self._found[layer]
        indices = indices[rows].long()
        memory = self.handles[layer].runtime.hot.attention_cache
        flat = memory.reshape(-1, self._work.sizes.row_bytes)
        return Reads(flat[indices.clamp(min=0)], indices >= 0, counts[rows])

    # --- between steps ------------------------------------------------------------------

    def rewritten(self, rows: Mapping[int, torch.Tensor]) -> None:
        """Forget hot copies of host rows, by request of the step before; once per step."""
        ids = torch.cat([torch.full_like(of, one).int() for one, of in sorted(rows.items())])
        written = torch.cat([of for _, of in sorted(rows.items())])
        for handle in self.handles:
            if handle.runtime.is_group_leader:
                handle.runtime.invalidate_written_slots(written, ids)

    def resize(self, blocks: Mapping[int, int]) -> None:
        """Leases of requests in hot blocks, fewer or more; with hisparsed's resolver only."""
        if self.node is None:
            raise RuntimeError("vLLM's kernels know one size of hot buffers")
        less = {one: count for one, count in blocks.items() if count < self._told.get(one, 0)}
        row_of = {_name(one): self.state_of[one] for one in range(self._work.requests)}
        leases = {_name(one): count for one, count in less.items()}
        self.node.resize(leases, row_of, [self._hot_by_state])
        self._told |= less
        slab = self._slab.view(self._work.slab_blocks, -1)
        for request, count in blocks.items():
            if count < self._blocks[request]:
                given = self._hot_blocks(request, count, self._blocks[request])
                slab[given.long()] = _GARBAGE
            held = self._hot_blocks(request, 0, count)
            self._hot[request, :count] = held
            self._hot_by_state[self.state_of[request], :count] = held
            self._blocks[request] = count


def _name(request: int) -> str:
    return str(request)
