"""How many requests of one context fit, and which limit says so. Pure arithmetic on a layout."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hisparsed.plan.layout import TAIL_PAGES, Layout


class Limit(StrEnum):
    """What keeps one more request from running."""

    GPU_BLOCKS = "gpu-blocks"
    HOST = "host"
    MAX_NUM_SEQS = "max_num_seqs"
    BASELINE = "baseline"
    """Without HiSparse as many fit, so it brings nothing here."""


@dataclass(frozen=True, slots=True)
class Concurrency:
    """Requests of ``context`` tokens each that run at once."""

    context: int
    baseline: int
    """All their KV on the GPU."""
    hybrid_gpu: int
    """By GPU blocks, with no page but the tail resident."""
    hybrid_host: int
    """By host blocks of the HiSparse pool."""
    result: int
    binds: Limit


def concurrency(
    layout: Layout, context: int, *, hot_rows: int, hisparse_bytes: int, max_num_seqs: int
) -> Concurrency:
    """The better of baseline and HiSparse; ``hisparse_bytes`` is the HiSparse pool's."""
    pages = layout.pages(context)
    limits = {
        Limit.MAX_NUM_SEQS: max_num_seqs,
        Limit.GPU_BLOCKS: layout.gpu_blocks // steady_blocks(layout, context, hot_rows),
        Limit.HOST: hisparse_bytes // layout.host_block_bytes // pages,
    }
    binds = min(limits, key=lambda limit: limits[limit])
    result = limits[binds]
    baseline = layout.baseline_blocks // pages
    if baseline > result:
        result, binds = baseline, Limit.BASELINE
    return Concurrency(
        context, baseline, limits[Limit.GPU_BLOCKS], limits[Limit.HOST], result, binds
    )


def steady_blocks(layout: Layout, context: int, hot_rows: int) -> int:
    """GPU blocks of a request that reads from the host: indexer pages, hot buffer, tail."""
    tails = layout.hot_groups * TAIL_PAGES
    return layout.pages(context) + layout.hot_blocks(hot_rows) + tails


def full_blocks(layout: Layout, context: int) -> int:
    """GPU blocks of a request that is fully resident: indexer pages and a page in each group."""
    return layout.pages(context) * (1 + layout.hot_groups)


def vllm_steady_state(
    layout: Layout, context: int, *, hot_rows: int, hisparse_bytes: int, in_flight_tokens: int
) -> float:
    """vLLM's own figure at start, for a ``max_model_len`` of ``context``.

    One request being admitted holds the pages of all its steps in flight, the others only
    their tails.
    """
    window = layout.pages(min(in_flight_tokens, context))
    fixed = layout.pages(context) + layout.hot_blocks(hot_rows)
    admission = fixed + layout.hot_groups * window
    steady = fixed + layout.hot_groups * min(window, TAIL_PAGES)
    if layout.gpu_blocks < admission:
        by_gpu = layout.gpu_blocks / admission
    else:
        by_gpu = 1 + (layout.gpu_blocks - admission) / steady
    return min(by_gpu, hisparse_bytes // layout.host_block_bytes / layout.pages(context))
