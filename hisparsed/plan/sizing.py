"""The plan of a node for given contexts: requests that fit, the limit that binds, memory, split.

Pure arithmetic on a layout. Every figure says whether it is that of vLLM's published calculator or
of vLLM's real layout. Also reads a host budget as operators type it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError

from hisparsed.config.node_description import NodeDescription
from hisparsed.errors import UserError
from hisparsed.plan.layout import TAIL_PAGES, Layout, published_layout, real_layout, stock_copies
from hisparsed.policy.bounds import vllm_multiplier
from hisparsed.policy.units import parse_bytes

_HINT = "give a size such as 512GiB"


def parse_budget(place: str, text: str) -> int:
    """Bytes of host memory. Raises ``UserError`` naming ``place``."""
    try:
        budget = parse_bytes(text)
    except PydanticCustomError as error:
        hint = (error.context or {}).get("hint", _HINT)
        raise UserError(f"{place}: {error.message()}; {hint}") from None
    if budget == 0:
        raise UserError(f"{place}: 0 holds nothing; {_HINT}")
    return budget


class Limit(StrEnum):
    """The limit that keeps one more request from running."""

    GPU_BLOCKS = "gpu-blocks"
    HOST = "host"
    MAX_NUM_SEQS = "max_num_seqs"
    BASELINE = "baseline"
    """As many requests fit without HiSparse, so it has no benefit here."""


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


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True)


class BlockBytes(_Part):
    """Bytes of one block of KV in each place."""

    baseline_gpu: int
    hisparse_gpu: int
    host: int
    chunk: int
    copies: int
    hot_groups: int


class LaidOut(_Part):
    """What vLLM's real layout admits, and the figure that vLLM logs at start."""

    baseline: int
    hybrid_gpu: int
    hybrid_host: int
    result: int
    binds: Limit
    steady_state: float


class SessionBytes(_Part):
    """Memory that one session of the context costs."""

    gpu_full: int
    """On each GPU while fully resident."""
    gpu_none: int
    """On each GPU with no page resident: indexer, hot buffer and tail."""
    host: int
    offload: int
    offload_stock: int
    """With stock vLLM's copies of the indexer."""


class ContextPlan(_Part):
    """``baseline`` to ``binds`` are the published calculator's; ``laid_out`` is vLLM's layout."""

    context: int
    baseline: int
    hybrid_gpu: int
    hybrid_host: int
    result: int
    binds: Limit
    laid_out: LaidOut
    session: SessionBytes
    one_more_x: float
    """Requests that one more x of multiplier costs, by real GPU blocks."""


class EqualReach(_Part):
    """The split at which both pools hold the same tokens."""

    copies: int
    hisparse_share: float
    hisparse_bytes: int
    offload_bytes: int
    reach_tokens: int


class Plan(_Part):
    """The whole answer of `hisparsed plan`."""

    node: str
    multiplier: float
    hot_rows: int
    stock_multiplier: float
    """The multiplier of stock vLLM where nothing is configured."""
    least_stock_multiplier: float
    """Below it stock vLLM refuses to start: every draft may select its own rows."""
    host_budget: int
    max_num_seqs: int
    published: BlockBytes
    real: BlockBytes
    split: list[EqualReach]
    contexts: list[ContextPlan]


def make_plan(
    node: NodeDescription,
    contexts: Sequence[int],
    *,
    multiplier: float,
    host_budget: int,
) -> Plan:
    """Plans for ``contexts`` in tokens; ``multiplier`` is hot rows / top-k.

    Raises ``UserError`` for what cannot be planned.
    """
    if multiplier < 1:
        raise UserError(
            f"--multiplier: {multiplier:g} is below 1; a hot buffer holds one step's top-k at least"
        )
    if not math.isfinite(multiplier):
        raise UserError(
            f"--multiplier: {multiplier:g} is not a number of hot rows; write one like 2.5"
        )
    if multiplier * node.model.topk > node.model.max_model_len:
        most = node.model.max_model_len / node.model.topk
        raise UserError(
            f"--multiplier: {multiplier:g} is more rows than the longest context has; need at "
            f"most {most:g}"
        )
    for context in contexts:
        if not 1 <= context <= node.model.max_model_len:
            raise UserError(
                f"--context: {context} is not right; need 1 to {node.model.max_model_len} tokens"
            )
    published, real = published_layout(node), real_layout(node, 1)
    stock = real_layout(node, stock_copies(node))
    hot_rows = math.ceil(multiplier * node.model.topk)
    splits = [_equal_reach(layout, host_budget) for layout in (real, stock)]
    return Plan(
        node=node.title,
        multiplier=multiplier,
        hot_rows=hot_rows,
        stock_multiplier=vllm_multiplier(node.query_len),
        least_stock_multiplier=node.query_len,
        host_budget=host_budget,
        max_num_seqs=node.engine.max_num_seqs,
        published=_block_bytes(published),
        real=_block_bytes(stock),
        split=splits,
        contexts=[
            _context_plan(node, published, real, stock, context, hot_rows, host_budget, splits[0])
            for context in contexts
        ],
    )


def _context_plan(
    node: NodeDescription,
    published: Layout,
    real: Layout,
    stock: Layout,
    context: int,
    hot_rows: int,
    host_budget: int,
    split: EqualReach,
) -> ContextPlan:
    most = node.engine.max_num_seqs
    calculator = concurrency(
        published, context, hot_rows=hot_rows, hisparse_bytes=host_budget, max_num_seqs=most
    )
    hisparse = split.hisparse_bytes
    laid_out = concurrency(
        real, context, hot_rows=hot_rows, hisparse_bytes=hisparse, max_num_seqs=most
    )
    if laid_out.result > most:
        # The published calculator ignores this limit, but vLLM runs no more requests, with or
        # without HiSparse.
        laid_out = replace(laid_out, result=most, binds=Limit.MAX_NUM_SEQS)
    steady = vllm_steady_state(
        real,
        context,
        hot_rows=hot_rows,
        hisparse_bytes=hisparse,
        in_flight_tokens=node.engine.concurrent_batches * node.engine.max_num_batched_tokens,
    )
    pages = real.pages(context)
    return ContextPlan(
        context=context,
        baseline=calculator.baseline,
        hybrid_gpu=calculator.hybrid_gpu,
        hybrid_host=calculator.hybrid_host,
        result=calculator.result,
        binds=calculator.binds,
        laid_out=LaidOut(
            baseline=laid_out.baseline,
            hybrid_gpu=laid_out.hybrid_gpu,
            hybrid_host=laid_out.hybrid_host,
            result=laid_out.result,
            binds=laid_out.binds,
            steady_state=steady,
        ),
        session=SessionBytes(
            gpu_full=full_blocks(real, context) * real.gpu_block_bytes,
            gpu_none=steady_blocks(real, context, hot_rows) * real.gpu_block_bytes,
            host=pages * real.host_block_bytes,
            offload=pages * real.chunk_bytes,
            offload_stock=pages * stock.chunk_bytes * stock.copies,
        ),
        one_more_x=_requests(real, context, hot_rows)
        - _requests(real, context, hot_rows + node.model.topk),
    )


def _requests(layout: Layout, context: int, hot_rows: int) -> float:
    return layout.gpu_blocks / steady_blocks(layout, context, hot_rows)


def _equal_reach(layout: Layout, host_budget: int) -> EqualReach:
    a_token = layout.host_token_bytes + layout.offload_token_bytes
    tokens = int(host_budget / a_token)
    hisparse = int(host_budget * layout.host_token_bytes / a_token)
    return EqualReach(
        copies=layout.copies,
        hisparse_share=layout.host_token_bytes / a_token,
        hisparse_bytes=hisparse,
        offload_bytes=host_budget - hisparse,
        reach_tokens=tokens,
    )


def _block_bytes(layout: Layout) -> BlockBytes:
    return BlockBytes(
        baseline_gpu=layout.baseline_block_bytes,
        hisparse_gpu=layout.gpu_block_bytes,
        host=layout.host_block_bytes,
        chunk=layout.chunk_bytes,
        copies=layout.copies,
        hot_groups=layout.hot_groups,
    )
