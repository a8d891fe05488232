"""A worker's hot buffers in miniature: vLLM's own runtimes and handles over small tensors.

On the CPU streams and events are stand-ins; ``without_cuda`` and ``two_hot_groups`` put them in
place. Block tables behave as those of vLLM's model runner: rows of a batch are gathered up to their
length, later cells keep old values. Every row of KV has different bytes, so a wrong row shows.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.hisparse import runtime as vllm_runtime

from hisparsed.engine.cuda.residency import vllm_hooks
from hisparsed.engine.cuda.residency.runtime import install
from hisparsed.engine.cuda.residency.worker import SentLeases, WorkerResidency


class Stand:
    """A stream or event that is always done."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> Stand:
        return self

    def __exit__(self, *_: object) -> None: ...

    def wait_stream(self, _: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...

    def record(self, _: Any = None) -> None: ...


class UnpinnedTorch:
    """torch, but host memory is not pinned and events are stand-ins."""

    Event = Stand

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *size: Any, **options: Any) -> torch.Tensor:
        options.pop("pin_memory", None)
        return torch.empty(*size, **options)


def two_hot_groups(patch: pytest.MonkeyPatch) -> None:
    """The miniature has no cache configuration of vLLM's; its hot groups are all there are."""
    patch.setattr(vllm_hooks, "hot_cache_groups", lambda _: [0, 1])


def without_cuda(patch: pytest.MonkeyPatch) -> None:
    """Let vLLM's runtimes be made and run on the CPU."""
    patch.setattr(vllm_runtime, "torch", UnpinnedTorch())
    patch.setattr(vllm_runtime, "_has_hisparse_ops", lambda: True)
    patch.setattr(vllm_runtime, "current_stream", Stand)
    patch.setattr(vllm_runtime, "in_piecewise_cudagraph", lambda: False)


BLOCK, PAGES, WIDTH, TOPK = 4, 12, 16, 6
REQUESTS, SLAB_BLOCKS, HOST_BLOCKS, LEASE_BLOCKS = 4, 400, 90, 12
LAYERS = ("a", "b", "c", "d")
"""Index groups: a with b in hot group 0, c in hot group 0 as well, d in hot group 1."""
GROUP_OF = {"a": 0, "b": 0, "c": 0, "d": 1}
LEADER_OF = {"a": "a", "b": "a", "c": "c", "d": "d"}
OFFSET_OF = {"a": 0, "b": 1, "c": 2, "d": 0}
PAGE = BLOCK * WIDTH
BLOCK_STRIDE = 3 * PAGE


@dataclass
class Held:
    """One request: its state row, tokens, and blocks by table."""

    row: int
    tokens: int
    host: list[int]
    resident: list[list[int]]
    """By hot group, one block per page, 0 where it is on the host only."""
    hot: list[list[int]]


@dataclass
class Read:
    """One layer's attention: indices [R, K], valid counts [R] and the rows there [R, K, row]."""

    indices: torch.Tensor
    counts: torch.Tensor
    rows: torch.Tensor


@dataclass
class HotWorker:
    seed: int
    device: str = "cpu"
    by_state: bool = True
    query_len: int = 1
    scratch_blocks: int = 0
    requests: dict[str, Held] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.slab = torch.zeros(SLAB_BLOCKS * BLOCK_STRIDE, dtype=torch.uint8, device=self.device)
        generator = torch.Generator().manual_seed(self.seed)
        self.host = {
            layer: torch.randint(0, 256, (HOST_BLOCKS, BLOCK, WIDTH), generator=generator).byte()
            for layer in LAYERS
        }
        if self.device == "cuda":
            self.host = {layer: rows.pin_memory() for layer, rows in self.host.items()}
        self.free = list(range(SLAB_BLOCKS - 1, self.scratch_blocks, -1))
        self.free_host = list(range(HOST_BLOCKS - 1, 0, -1))
        self.free_rows = list(range(REQUESTS))
        self.source = self._ints(REQUESTS, PAGES)
        self.hot_input = self._ints(2, REQUESTS, LEASE_BLOCKS)
        self.residency = self._ints(2, REQUESTS, PAGES)
        self.states = self._ints(REQUESTS) - 1
        self.hot_rows = self._ints(2, REQUESTS, LEASE_BLOCKS)
        self.num_blocks = np.zeros((2, REQUESTS), dtype=np.int32)
        self.sent = SentLeases()
        self.known: set[str] = set()
        self.handles = self._handles()
        self.node: WorkerResidency = install(
            list(self.handles.values()),
            [GROUP_OF[layer] for layer in LAYERS],
            scratch=range(1, 1 + self.scratch_blocks),
        )

    def _ints(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.device)

    def _handles(self) -> dict[str, Any]:
        config = vllm_runtime.ResolvedHiSparseConfig(
            top_k=TOPK,
            device_buffer_size=LEASE_BLOCKS * BLOCK,
            max_union_rows=self.query_len * TOPK,
        )
        handles: dict[str, Any] = {}
        for layer in LAYERS:
            leader = LEADER_OF[layer]
            runtime = vllm_runtime.HiSparseRuntime(
                config=config,
                max_num_reqs=REQUESTS,
                row_width=WIDTH,
                kv_dtype=torch.uint8,
                device=self.device,
                max_swap_rows=REQUESTS * self.query_len,
                index_group=None if leader == layer else handles[leader].runtime.index_group,
                copy_stream=Stand() if self.device == "cpu" else None,
            )
            group = GROUP_OF[layer]
            where = {
                "byte_offset": OFFSET_OF[layer] * PAGE,
                "block_stride": BLOCK_STRIDE,
                "num_blocks": SLAB_BLOCKS,
                "block_size": BLOCK,
            }
            runtime.bind_hot_cache(self.slab, **where, block_table=self.hot_input[group])
            runtime.bind_source_cache(self.host[layer], registered_host_pool=self.host[layer])
            runtime.request_state_indices = self.states
            handle = vllm_runtime.HiSparseCacheHandle(runtime)
            handle.bind_cache(
                self.slab,
                **where,
                block_table=self.residency[group],
                slot_mapping=torch.zeros(1, dtype=torch.int64, device=self.device),
            )
            handle.source_block_table = self.source
            if self.by_state:
                handle.residency = self.residency
            handles[layer] = handle
        return handles

    # --- what vLLM's scheduler and model runner would do -------------------------------

    def start(self, name: str, *, tokens: int, hot_blocks: int) -> None:
        """A request with all its pages on the host, and some on the GPU too."""
        pages = -(-tokens // BLOCK)
        held = Held(
            row=self.free_rows.pop(self.rng.randrange(len(self.free_rows))),
            tokens=tokens,
            host=[self.free_host.pop() for _ in range(pages)],
            resident=[[0] * pages for _ in range(2)],
            hot=[[self.free.pop() for _ in range(hot_blocks)] for _ in range(2)],
        )
        for page in range(pages):
            if self.rng.random() < 0.25:
                for group in range(2):
                    held.resident[group][page] = self._resident_copy(group, held.host[page])
        self.requests[name] = held
        for group in range(2):
            self.hot_rows[group, held.row] = 0

    def _resident_copy(self, group: int, host_block: int) -> int:
        block = self.free.pop()
        for layer in LAYERS:
            if GROUP_OF[layer] == group:
                start = block * BLOCK_STRIDE + OFFSET_OF[layer] * PAGE
                self.slab[start : start + PAGE] = self.host[layer][host_block].view(-1)
        return block

    def end(self, name: str) -> None:
        held = self.requests.pop(name)
        self.free_rows.append(held.row)
        self.free_host.extend(held.host)
        blocks = [block for table in (*held.resident, *held.hot) for block in table if block]
        self.free.extend(blocks)
        for block in blocks:
            # Whoever gets the block next writes it at once.
            self.slab[block * BLOCK_STRIDE :][:BLOCK_STRIDE] = self.rng.randrange(256)

    def grow(self, name: str, blocks: int) -> None:
        for table in self.requests[name].hot:
            table.extend(self.free.pop() for _ in range(blocks))

    def step_batch(self, *, ended: tuple[str, ...] = ()) -> list[str]:
        """Gather the tables of a batch in random order, and give them to the node."""
        names = self.rng.sample(sorted(self.requests), len(self.requests))
        self.states.fill_(-1)
        for at, name in enumerate(names):
            held = self.requests[name]
            self.states[at] = held.row
            self.source[at, : len(held.host)] = torch.tensor(held.host)
            for group in range(2):
                # Appended behind what the worker's own table holds, as vLLM does.
                have = int(self.num_blocks[group, held.row]) if name in self.known else 0
                new = held.hot[group][have:]
                self.hot_rows[group, held.row, have : have + len(new)] = torch.tensor(
                    new, dtype=torch.int32
                )
                self.num_blocks[group, held.row] = have + len(new)
                count = have + len(new)
                self.hot_input[group, at, :count] = self.hot_rows[group, held.row, :count]
                table = self.residency[group, held.row if self.by_state else at]
                table[: len(held.resident[group])] = torch.tensor(held.resident[group])
        fresh = [name for name in names if name not in self.known]
        self.known = set(names)
        updates = self.sent.updates(
            names,
            fresh=fresh,
            ended=ended,
            held=lambda name: tuple(len(table) for table in self.requests[name].hot),
        )
        for handle in self.handles.values():
            handle.runtime.begin_forward()
        self.node.before_forward(updates, names, self.states[: len(names)].long())
        return names

    def decode(self, names: list[str], *, padding: int = 0) -> list[list[int]]:
        """One step of every index group; checks each byte that attention would read."""
        topk = self.selection(names, padding=padding)
        chosen = torch.tensor(topk, dtype=torch.int32, device=self.device)
        self.check(names, topk, self.forward(names, chosen, self.batch_rows(names, padding)))
        return topk

    def selection(self, names: list[str], *, padding: int = 0) -> list[list[int]]:
        """Top-k positions of each decode row, -1 behind them and in padding rows."""
        rows = [self.requests[name] for name in names for _ in range(self.query_len)]
        return [self._select(held) for held in rows] + [[-1] * TOPK] * padding

    def batch_rows(self, names: list[str], padding: int = 0) -> torch.Tensor:
        """Batch row of each decode row; padding rows say 0, as in a captured graph."""
        rows = [at for at in range(len(names)) for _ in range(self.query_len)]
        return torch.tensor(rows + [0] * padding, dtype=torch.int32, device=self.device)

    def forward(
        self, names: list[str], chosen: torch.Tensor, request_ids: torch.Tensor
    ) -> dict[str, Read]:
        """The rows that each layer's attention gets, and reads before the next layer begins."""
        real = torch.full((1,), len(names) * self.query_len, device=self.device)
        found = {}
        for layer, handle in self.handles.items():
            handle.decode_batch = self.query_len == 1
            indices, counts = handle.swap_in(
                request_ids,
                self.source,
                chosen,
                block_size=BLOCK,
                num_valid_rows=real,
                return_valid_counts=True,
            )
            memory = handle.runtime.hot.attention_cache.reshape(-1, WIDTH)
            found[layer] = Read(indices, counts, memory[indices.clamp(min=0)])
        return found

    def check(
        self,
        names: list[str],
        topk: list[list[int]],
        found: dict[str, Read],
    ) -> None:
        """Every selected position is read, and its bytes are right on every layer."""
        rows = [self.requests[name] for name in names for _ in range(self.query_len)]
        cells = [
            (row, column, held.host[position // BLOCK], position % BLOCK)
            for row, (held, positions) in enumerate(zip(rows, topk, strict=False))
            for column, position in enumerate(positions)
            if position >= 0
        ]
        row, column, block, offset = (torch.tensor(part) for part in zip(*cells, strict=True))
        for layer, read in found.items():
            counts = [sum(p >= 0 for p in positions) for positions in topk]
            assert read.counts.tolist() == counts
            assert int((read.indices >= 0).sum()) == len(cells), "nothing else is read"
            rows_read = read.rows.cpu()[row, column]
            assert torch.equal(rows_read, self.host[layer][block, offset]), layer

    def _select(self, held: Held) -> list[int]:
        count = min(held.tokens, self.rng.choice([TOPK, TOPK, TOPK - 2]))
        return self.rng.sample(range(held.tokens), count) + [-1] * (TOPK - count)

    # --- what the worker extension sees --------------------------------------------------

    def resize(self, leases: dict[str, int]) -> int:
        """Rows move, then the scheduler gives the blocks back."""
        moved = self.ask_to_shrink(leases)
        for name, blocks in leases.items():
            if name in self.requests:
                self.give_back(name, blocks)
        return moved

    def ask_to_shrink(self, leases: dict[str, int]) -> int:
        """The worker's call as vLLM makes it."""
        worker = type("Worker", (vllm_hooks.HotExtension,), {})()
        worker.model_runner = self.model_runner()
        shrunk, moved = worker.hisparsed_resize_hot(leases)
        assert shrunk == sum(name in self.requests for name in leases)
        return int(moved)

    def model_runner(self) -> Any:
        return SimpleNamespace(
            req_states=SimpleNamespace(
                req_id_to_index={name: held.row for name, held in self.requests.items()}
            ),
            block_tables=SimpleNamespace(
                block_tables=[SimpleNamespace(gpu=table) for table in self.hot_rows],
                num_blocks=SimpleNamespace(np=self.num_blocks),
            ),
            kv_cache_config=None,
        )

    def give_back(self, name: str, blocks: int) -> None:
        """Others get the blocks, and write them."""
        for table in self.requests[name].hot:
            surplus = table[blocks:]
            del table[blocks:]
            self.free.extend(surplus)
            for block in surplus:
                self.slab[block * BLOCK_STRIDE :][:BLOCK_STRIDE] = self.rng.randrange(256)

    # --- a life at random ----------------------------------------------------------------

    @property
    def least_blocks(self) -> int:
        """Of a legal lease."""
        return -(-TOPK * (1 if self.scratch_blocks else self.query_len) // BLOCK)

    def live(self, *, steps: int) -> tuple[int, int]:
        """Requests come, decode, grow, shrink and go; returns how many came, and rows moved."""
        began = moved = 0
        ended: tuple[str, ...] = ()
        for step in range(steps):
            if len(self.requests) < REQUESTS and self.rng.random() < 0.4:
                tokens = self.rng.randrange(5, PAGES * BLOCK - 8)
                hot_blocks = self.rng.randrange(self.least_blocks, LEASE_BLOCKS)
                self.start(f"r{step}", tokens=tokens, hot_blocks=hot_blocks)
                began += 1
            if self.requests:
                names = self.step_batch(ended=ended)
                ended = ()
                self.decode(names, padding=(REQUESTS - len(names)) * self.query_len)
            for name in sorted(self.requests):
                ended = (*ended, name) if self._change(name) else ended
                moved += self._shrink_at_random(name)
            assert not self.node.failed
        return began, moved

    def _change(self, name: str) -> bool:
        """Whether the request has ended."""
        choice = self.rng.random()
        if choice < 0.05:
            self.end(name)
        elif choice < 0.2 and len(self.requests[name].hot[0]) < LEASE_BLOCKS:
            self.grow(name, 1)
        return choice < 0.05

    def _shrink_at_random(self, name: str) -> int:
        if name not in self.requests or name not in self.known or self.rng.random() > 0.2:
            return 0
        # Blocks leased since the last step are not in the worker's tables yet.
        held = int(self.num_blocks[0, self.requests[name].row])
        if held <= self.least_blocks or held < len(self.requests[name].hot[0]):
            return 0
        return self.resize({name: self.rng.randrange(self.least_blocks, held)})
