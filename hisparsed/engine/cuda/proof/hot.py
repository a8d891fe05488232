"""Compares hisparsed's resolver and gather with vLLM's operators, on the same random steps.

Every step is compared row by row with what the host has; then both are timed. hisparsed's moves
leases, vLLM's has one size, as on the node.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from hisparsed.engine.cuda.proof.addresses import first_difference_past_int32
from hisparsed.engine.cuda.proof.compare import first_difference
from hisparsed.engine.cuda.proof.question import HotProof, HotSizes, Timing
from hisparsed.engine.cuda.proof.work import Work, WorkStep, work_steps
from hisparsed.engine.cuda.proof.worker import Pool, Side
from hisparsed.kernels.api import raise_errors

EAGER_STEPS = 10
REPLAYED_STEPS = 10
WARM_STEPS = 8
TIMED_STEPS = 24
_ROWS_AT_ONCE = 16
"""Decode rows whose KV rows are compared together: 22 MB per layer at top-k 2,048."""
_SEED = 20


def prove_hot(sizes: HotSizes, device: torch.device) -> HotProof:
    """Raises whatever the device, vLLM or our kernels raise."""
    difference = first_difference_past_int32(device)
    if difference is not None:
        return HotProof(difference=difference)
    work = Work.within(sizes, _free_bytes(device))
    with torch.inference_mode():
        pool = Pool(work, device, seed=_SEED)
        vllm, ours = Side(pool, device, ours=False), Side(pool, device, ours=True)
        proof = SideBySide(pool, vllm, ours, device)
        steps = work_steps(work, device, seed=_SEED)
        difference = proof.compare(steps, EAGER_STEPS)
        recorded = difference is None and device.type == "cuda"
        if recorded:
            vllm.record()
            ours.record()
            difference = proof.compare(steps, REPLAYED_STEPS)
        raise_errors(device)
        if difference is not None:
            return HotProof(difference=difference, rows=proof.rows, graph=recorded)
        timings = tuple(
            _timed(pool, vllm, ours, steps, requests, device) for requests in _batches(work)
        )
        raise_errors(device)
        _require_nothing_dropped(ours)
    return HotProof(rows=proof.rows, graph=recorded, timings=timings)


def _free_bytes(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 2**30


def _require_nothing_dropped(side: Side) -> None:
    if side.node is None:
        return
    counters = side.node.bank.arrays["counters"].sum(dim=(0, 1)).tolist()
    if counters[-1]:
        raise RuntimeError(f"{counters[-1]} selected rows had no place in a step")


class SideBySide:
    """Steps through both sides. ``rows``: compared so far."""

    def __init__(self, pool: Pool, vllm: Side, ours: Side, device: torch.device) -> None:
        self._pool, self._vllm, self._ours, self._device = pool, vllm, ours, device
        self._random = random.Random(_SEED)
        self.rows = 0

    def compare(self, steps: Iterator[WorkStep], count: int) -> str | None:
        """The first difference of hisparsed's. Raises ``RuntimeError`` where vLLM's reads are
        wrong: then the proof is, or vLLM, and hisparsed's is not judged."""
        for number in range(count):
            step = next(steps)
            for side in (self._vllm, self._ours):
                side.begin(step)
                side.run()
            theirs = self._difference(self._vllm, step)
            if theirs is not None:
                raise RuntimeError(
                    f"vLLM's own kernels read other rows than the host has: {theirs}"
                )
            found = self._difference(self._ours, step)
            if found is not None:
                return f"step {number}, {found}"
            self._between(step, number)
        return None

    def _difference(self, side: Side, step: WorkStep) -> str | None:
        work = self._pool.work
        for layer in range(work.layers):
            for first in range(0, work.rows, _ROWS_AT_ONCE):
                rows = slice(first, min(work.rows, first + _ROWS_AT_ONCE))
                right = self._pool.reads(layer, step, rows)
                found = first_difference(side.reads(layer, rows), right)
                if found is not None:
                    return f"layer {layer}, rows from {first}: {found}"
                if side is self._ours:
                    self.rows += int(right.counts.sum())
        return None

    def _between(self, step: WorkStep, number: int) -> None:
        """Rejected drafts of some requests, and leases that shrink and grow."""
        work = self._pool.work
        written = {
            request: self._pool.rewrite(request, work.sizes.query_len)
            for request in range(0, step.requests, 3)
        }
        for side in (self._vllm, self._ours):
            side.rewritten(written)
        known = range(step.requests)
        if number % 2:
            size = {
                one: self._random.randint(work.least_blocks, work.start_blocks) for one in known
            }
        else:
            size = dict.fromkeys(known, work.most_blocks if number % 4 else work.start_blocks)
        self._ours.resize(size)


def _batches(work: Work) -> tuple[int, ...]:
    return tuple(sorted({1, min(8, work.requests), work.requests}))


def _timed(
    pool: Pool,
    vllm: Side,
    ours: Side,
    steps: Iterator[WorkStep],
    requests: int,
    device: torch.device,
) -> Timing:
    """Both with equal leases, which are warm before the first step that counts."""
    work = pool.work
    ours.resize(dict.fromkeys(range(work.requests), work.start_blocks))
    rows = requests * work.sizes.query_len
    taken: dict[Side, list[float]] = {vllm: [], ours: []}
    clocks = {
        side: _clock(lambda side=side: side.run_first_group(rows), device)  # type: ignore[misc]
        for side in taken
    }
    for number in range(WARM_STEPS + TIMED_STEPS):
        step = _of_requests(next(steps), requests, work)
        for side, clock in clocks.items():
            side.begin(step)
            us = clock()
            if number >= WARM_STEPS:
                taken[side].append(us)
    vllm_us, ours_us = (statistics.median(taken[side]) for side in (vllm, ours))
    return Timing(requests=requests, ours_us=ours_us, vllm_us=vllm_us)


def _of_requests(step: WorkStep, requests: int, work: Work) -> WorkStep:
    topk = step.topk.clone()
    topk[requests * work.sizes.query_len :] = -1
    return WorkStep(topk, min(step.requests, requests))


def _clock(action: Callable[[], None], device: torch.device) -> Callable[[], float]:
    """Runs ``action`` and returns its microseconds; on a GPU as the replay of a graph."""
    if device.type != "cuda":

        def on_cpu() -> float:
            began_s = time.perf_counter()
            action()
            return (time.perf_counter() - began_s) * 1e6

        return on_cpu
    action()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        action()
    begin, end = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )

    def replay() -> float:
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3

    return replay
