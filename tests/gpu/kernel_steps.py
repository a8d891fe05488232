"""The steps of ``python -m tests.gpu --kernels``: torch and Triton are enough, no vLLM, no index.

Steps that need no card run on a CPU too, with the kernels interpreted (``--rehearse``).
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import random
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from gpu_suite import Figures, SkipError, Step

TESTS = Path(__file__).parents[1]
WITHIN_S = 290.0
GIB = 2**30
ORACLE_STEPS = 400
REHEARSED_STEPS = 4
PIN_GIB = 32
CONTEXTS = (8_192, 131_072)
REQUESTS = (1, 8, 64)
TOPK, HOT_ROWS, ROW_BYTES, BLOCK = 2048, 4096, 656, 64


def device_of(rehearse: bool) -> Any:
    import torch

    return torch.device("cpu" if rehearse else "cuda:0")


def environment() -> Figures:
    import torch
    import triton

    figures: Figures = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "gpu": None,
    }
    if torch.cuda.is_available():
        found: Any = torch.cuda.get_device_properties(0)
        figures |= {
            "gpu": found.name,
            "gpu_memory_gib": round(found.total_memory / GIB, 1),
            "gpu_capability": f"{found.major}.{found.minor}",
        }
    return figures


def oracle(rehearse: bool) -> Figures:
    """Random small steps against the brute-force oracle; raises at the first wrong word."""
    sys.path.insert(0, str(TESTS / "kernels"))
    import torch
    from lockstep import Shape, compare_outputs

    from hisparsed.kernels.api import Resolution, reset, resolve
    from hisparsed.kernels.api import set_capacity as shrink_or_grow

    device, rng, shape = device_of(rehearse), random.Random(5), Shape()
    truth, geometry, state = shape.oracle(), shape.geometry(), shape.state(device)

    def ints(data: Any) -> Any:
        return torch.tensor(data, dtype=torch.int32, device=device)

    for row in range(shape.states):
        truth.reset(row, shape.capacity)
        reset(state, row, capacity=shape.capacity)
    steps = REHEARSED_STEPS if rehearse else ORACLE_STEPS
    for number in range(steps):
        row = rng.randrange(shape.states)
        if number % 5 == 4:
            capacity = rng.randrange(2 * shape.topk, shape.capacity + 1)
            moved = [list(pair) for pair in truth.set_capacity(row, capacity)]
            assert shrink_or_grow(state, row, capacity).tolist() == moved, "moves of a shrink"
        owners = rng.sample(range(shape.states), shape.states)
        source = [rng.sample(range(1, shape.host_blocks), shape.pages) for _ in range(shape.states)]
        resident = [
            [rng.choice([0, 0, 0, 3000 + page]) for page in range(shape.pages)] for _ in owners
        ]
        hot = [
            [1 + owner * shape.hot_blocks + block for block in range(shape.hot_blocks)]
            for owner in owners
        ]
        topk = [
            [*rng.sample(range(shape.positions), shape.topk - 1), rng.choice([-1, 5])]
            for _ in range(2 * shape.states)
        ]
        ids = [one // 2 for one in range(2 * shape.states)]
        ids[-2:] = rng.choice([[-1, -1], ids[-2:]])
        truth.clock += 1
        state.begin_step()
        expected = truth.resolve(topk, ids, owners, source, resident, hot, [])
        out = Resolution.create(len(topk), shape.topk, device=device)
        tables = map(ints, (topk, ids, owners, source, resident, hot))
        found = resolve(state, geometry, *tables, out=out, backend="triton")
        compare_outputs(f"step {number}", found, expected)
    counters = [sum(row.counters[name] for row in truth.rows) for name in ("hits", "loads")]
    assert state.counters.sum(dim=0).tolist()[2:4] == counters
    return {"steps": steps, "hits": counters[0], "loads": counters[1]}


def addresses(rehearse: bool) -> Figures:
    from hisparsed.engine.cuda.proof.addresses import PAST, first_difference_past_int32

    difference = first_difference_past_int32(device_of(rehearse))
    if difference is not None:
        raise AssertionError(difference)
    return {"first_row_past": PAST}


def state_size() -> Figures:
    """MB a GPU for 64 requests and GLM-5.x's 22 index groups; 1M shows what grows."""
    from hisparsed.kernels.api import state_bytes

    figures: Figures = {}
    for times, query_len in ((2, 1), (5, 4)):
        for name, positions in (("128k", 131_072), ("1m", 1_048_576)):
            sizes = state_bytes(22, 64, times * TOPK, positions, rows=64 * query_len, topk=TOPK)
            figures[f"{times}x_{name}_mb"] = round(sum(sizes) / 1e6, 1)
    return figures


def registers() -> Figures:
    """Of every kernel, compiled for the card's generation; needs no card."""
    report = subprocess.run(
        [sys.executable, "-m", "hisparsed.kernels.triton_report", "--json"],
        check=False,
        capture_output=True,
        text=True,
        # Interpreted kernels are not compiled.
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
    )
    if report.returncode:
        raise RuntimeError(f"the report failed: {report.stderr.strip().splitlines()[-1:]}")
    found: Figures = json.loads(report.stdout)
    return {
        "target": found.get("target") or found.get("targets"),
        "kernels": found["kernels"],
    }


class World:
    """Drifting selections of ``requests`` requests over ``context`` positions, on a GPU."""

    def __init__(self, requests: int, context: int) -> None:
        import torch

        from hisparsed.kernels.api import (
            Geometry,
            Resolution,
            ResolverState,
            RowLayout,
            reserve,
            reset,
        )

        self.torch, self.device = torch, torch.device("cuda:0")
        pages, hot_blocks = context // BLOCK, HOT_ROWS // BLOCK
        page = BLOCK * ROW_BYTES
        self.geometry = Geometry(BLOCK, BLOCK, requests * hot_blocks + 1, pages + 1)
        self.layout = RowLayout(BLOCK, ROW_BYTES, page, page, (0,), (0,))
        self.host = torch.zeros((pages + 1) * page, dtype=torch.uint8, pin_memory=True)
        self.host.view(torch.int32).random_(generator=torch.Generator().manual_seed(1))
        self.slab = torch.zeros(
            self.geometry.slab_blocks * page, dtype=torch.uint8, device=self.device
        )
        self.state = ResolverState.create(requests, HOT_ROWS, context, device=self.device)
        for row in range(requests):
            reset(self.state, row, capacity=HOT_ROWS)
        reserve(self.state, requests)
        ids = torch.arange(requests, dtype=torch.int32, device=self.device)
        table = torch.arange(1, pages + 1, dtype=torch.int32, device=self.device)
        hot = torch.arange(1, requests * hot_blocks + 1, dtype=torch.int32, device=self.device)
        source = table.repeat(requests, 1).contiguous()
        self.tables = (
            ids,
            ids.clone(),
            source,
            torch.zeros_like(source),
            hot.view(requests, hot_blocks),
        )
        self.generator = torch.Generator(self.device).manual_seed(3)
        self.scores = self._noise(requests, context)
        self.topk = torch.empty((requests, TOPK), dtype=torch.int32, device=self.device)
        self.out = Resolution.create(requests, TOPK, device=self.device)
        self.next()

    def _noise(self, *shape: int) -> Any:
        return self.torch.randn(*shape, generator=self.generator, device=self.device)

    def next(self) -> None:
        self.scores.mul_(0.95).add_(self._noise(*self.scores.shape), alpha=0.3)
        self.topk.copy_(self.torch.topk(self.scores, TOPK, dim=1).indices)

    def resolve(self) -> None:
        from hisparsed.kernels.api import resolve

        resolve(self.state, self.geometry, self.topk, *self.tables, out=self.out)

    def gather(self) -> None:
        from hisparsed.kernels.api import gather

        swaps = (self.out.swap_host, self.out.swap_physical, self.out.swap_counts)
        gather(self.host, self.slab, self.layout, *swaps)

    def require_right(self) -> None:
        """Every selected row is where attention would read it."""
        torch = self.torch
        rows = self.slab.view(-1, ROW_BYTES)[self.out.physical_rows]
        host = self.host.view(-1, ROW_BYTES)
        right = host[(self.topk.long().cpu() + BLOCK)].to(self.device)
        if not torch.equal(rows, right):
            wrong = (rows != right).any(dim=2).sum()
            raise AssertionError(f"{int(wrong)} of {self.topk.numel()} rows are wrong")

    def recorded(self, action: Any) -> Any:
        torch = self.torch
        action()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            action()
        return graph


def graphs() -> Figures:
    """Resolve and gather as the replay of one graph: every row right in every step."""
    from hisparsed.kernels.api import raise_errors

    world = World(requests=4, context=32_768)

    def step() -> None:
        world.resolve()
        world.gather()

    graph = world.recorded(step)
    before = world.torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(30):
        world.next()
        world.state.begin_step()
        graph.replay()
        world.torch.cuda.synchronize()
        world.require_right()
    raise_errors(world.device)
    allocated = world.torch.cuda.memory_stats()["allocation.all.allocated"] - before
    return {"replays": 30, "allocations_beside_checks": allocated}


def timings() -> Figures:
    """Median microseconds of a warm step, each part as the replay of a graph."""
    figures: Figures = {}
    for context in CONTEXTS:
        for requests in REQUESTS:
            world = World(requests, context)
            parts = {"resolve": world.recorded(world.resolve), "gather": None}
            parts["gather"] = world.recorded(world.gather)
            taken: dict[str, list[float]] = {name: [] for name in parts}
            moved = 0
            for number in range(40):
                world.next()
                world.state.begin_step()
                for name, graph in parts.items():
                    us = _replay_us(world.torch, graph)
                    if number >= 10:
                        taken[name].append(us)
                moved += int(world.out.swap_counts.sum()) if number >= 10 else 0
            name = f"context{context}_n{requests}"
            for part, values in taken.items():
                figures[f"{name}_{part}_us"] = round(sorted(values)[len(values) // 2], 1)
            seconds = sum(taken["gather"]) / 1e6
            figures[f"{name}_gather_gb_per_s"] = round(moved * ROW_BYTES / seconds / 1e9, 2)
    return figures


def _replay_us(torch: Any, graph: Any) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def pinning() -> Figures:
    """Seconds to register and unregister 32 GiB that were written; less where memory is short."""
    import torch

    size_gib = PIN_GIB
    while size_gib > 1 and available_bytes() < 1.2 * size_gib * GIB:
        size_gib //= 2
    if available_bytes() < 1.2 * size_gib * GIB:
        raise SkipError("less than 1.2 GiB of host memory are free")
    runtime = torch.cuda.cudart()
    torch.zeros(1, device="cuda")
    memory = torch.zeros(size_gib * GIB, dtype=torch.uint8)
    began_s = time.perf_counter()
    error = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    pinned_s = time.perf_counter()
    if int(error):
        raise RuntimeError(f"cudaHostRegister of {size_gib} GiB: error {int(error)}")
    runtime.cudaHostUnregister(memory.data_ptr())
    return {
        "gib": size_gib,
        "pin_s": round(pinned_s - began_s, 3),
        "unpin_s": round(time.perf_counter() - pinned_s, 3),
    }


def kernel_steps(*, rehearse: bool) -> tuple[Step, ...]:
    """``rehearse``: without a card, those that a CPU can run."""
    needs = () if rehearse else ("gpu",)
    every = (
        Step("environment", "what this machine is", 30, environment, needs=()),
        Step("oracle", "the brute-force oracle's integers", 100, partial(oracle, rehearse), needs),
        Step("addresses", "row numbers past 2**31", 60, partial(addresses, rehearse), needs),
        Step("state-size", "memory of the resolver's state", 30, state_size, needs=()),
        Step("registers", "what each kernel costs an SM", 90, registers, needs=()),
        Step("graphs", "replayed graphs make attention read the right rows", 60, graphs),
        Step("timings", "resolve and gather by context and batch", 100, timings),
        Step("pinning", "registering 32 GiB of host memory", 100, pinning),
    )
    return tuple(one for one in every if not rehearse or "gpu" not in one.needs)


def why_missing(need: str) -> str | None:
    """Why ``need`` is not met; ``None`` where it is."""
    for name in ("torch", "triton"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed for {sys.executable}"
    import torch

    return None if torch.cuda.is_available() else f"torch {torch.__version__} sees no CUDA device"
