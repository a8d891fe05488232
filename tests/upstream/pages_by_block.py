"""The scheduler's CPU time for a page grows with the number of index groups.

A page of HiSparse has one GPU block in each index group, and all of them are allocated, copied,
unpinned and lost at the same moments. ``HiSparseCoordinator`` and the resident managers ask each
group on its own, page by page, several times from a page's allocation to its reuse. What is counted
here are Python calls, which do not depend on the machine: those of a prefill at 4 and at 20 index
groups, and so what one more group adds for each page.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from types import FrameType
from typing import Any

from tests.upstream.outcome import run
from tests.upstream.stock import BLOCK, Shape, Workers, stock_engine, text

PAGES = 192
GROUPS = (4, 20)
MOST_CALLS = 2.0
"""Of a page and group, where pages are kept whole: each block is at least taken and given back."""


@dataclass(frozen=True)
class Cost:
    """Of one prefill."""

    calls: int
    cpu_ms: float


def shape(groups: int) -> Shape:
    return Shape(
        gpu_blocks=PAGES * (groups + 2),
        host_blocks=2 * PAGES,
        index_groups=groups,
        hot_rows=128,
        max_num_batched_tokens=512,
        max_model_len=(PAGES + 2) * BLOCK,
    )


def prefill(groups: int) -> Cost:
    with stock_engine(shape(groups)) as core:
        workers = Workers(core)
        workers.add(text(PAGES * BLOCK, "warm"), 1)
        assert workers.run()
        timed, counted = (text(PAGES * BLOCK, seed) for seed in ("timed", "counted"))
        workers.add(timed, 1)
        began_s = time.thread_time()
        assert workers.run()
        cpu_s = time.thread_time() - began_s
        workers.add(counted, 1)
        calls = 0

        def count(frame: FrameType, event: str, _: Any) -> None:
            nonlocal calls
            calls += event == "call" and "/vllm/" in frame.f_code.co_filename

        sys.setprofile(count)
        try:
            done = workers.run()
        finally:
            sys.setprofile(None)
        assert done
    return Cost(calls, cpu_s * 1e3)


def reproduce() -> str | None:
    few, many = (prefill(groups) for groups in GROUPS)
    calls = (many.calls - few.calls) / (GROUPS[1] - GROUPS[0]) / PAGES
    if calls <= MOST_CALLS:
        return None
    return (
        f"One more index group costs {calls:.1f} Python calls for each page. A prompt of {PAGES} "
        f"pages makes {few.calls} calls and takes {few.cpu_ms:.0f} ms of CPU time with {GROUPS[0]} "
        f"index groups, {many.calls} calls and {many.cpu_ms:.0f} ms with {GROUPS[1]}."
    )


if __name__ == "__main__":
    run(reproduce)
