"""The plan of a node for some contexts: every figure, and whose it is. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from pydantic import BaseModel, ConfigDict

from hisparsed.config.node_description import NodeDescription
from hisparsed.errors import UserError
from hisparsed.plan.concurrency import (
    Limit,
    concurrency,
    full_blocks,
    steady_blocks,
    vllm_steady_state,
)
from hisparsed.plan.layout import Layout, published_layout, real_layout, stock_copies
from hisparsed.policy.bounds import vllm_multiplier


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
    """What stock vLLM leases where nothing is configured."""
    least_stock_multiplier: float
    """Below it stock vLLM refuses to start: every draft may select rows of its own."""
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
            f"--multiplier: {multiplier:g} is no number of hot rows; write one like 2.5"
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
        # The published calculator does not say so, but vLLM runs no more, with HiSparse or not.
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
