"""Scratch blocks: GPU blocks that all requests share for rows that do not fit a hot buffer.

They are taken once, before the first request, so scheduler and workers agree on their numbers
without a message and a GPU graph can hold their addresses. The resolver decides where a row goes.
Imports neither vLLM nor torch.
"""

from __future__ import annotations

from typing import Any

CONCURRENT_REQUESTS = 4
"""Requests whose worst overflow fits the scratch at the same time; in larger steps they take
turns."""


def scratch_block_count(*, query_len: int, topk: int, block_tokens: int, max_num_seqs: int) -> int:
    """Blocks for ``CONCURRENT_REQUESTS`` requests at the least lease of one top-k.

    The rows of a step select at most ``query_len * topk`` tokens, so at most
    ``(query_len - 1) * topk`` of them do not fit. One index group uses all of it, then the next.
    """
    rows = min(max_num_seqs, CONCURRENT_REQUESTS) * (query_len - 1) * topk
    return -(-rows // block_tokens)


def whole_step_scratch_blocks(
    *, query_len: int, topk: int, block_tokens: int, max_num_seqs: int
) -> int:
    """Blocks for a step of ``max_num_seqs`` requests at the least lease of one top-k.

    For nodes whose steps are recorded as graphs, which cannot take turns.
    """
    return -(-max_num_seqs * (query_len - 1) * topk // block_tokens)


def scratch_block_ids(count: int) -> range:
    """The first ``count`` blocks of a pool; block 0 is vLLM's null block."""
    return range(1, 1 + count)


def lease_scratch(pool: Any, count: int) -> None:
    """Take ``count`` blocks out of vLLM's ``BlockPool`` for as long as the engine lives.

    The pool is smaller from then on: its usage and its cache reset do not count them. Raises
    ``RuntimeError`` when others were given blocks before.
    """
    if count == 0:
        return
    taken = [block.block_id for block in pool.get_new_blocks(count)]
    if taken != list(scratch_block_ids(count)):
        raise RuntimeError(
            f"scratch blocks must be the first {count} of the GPU pool, which gave "
            f"{taken[0]} to {taken[-1]}; lease them before the first request"
        )
    pool.num_gpu_blocks -= count
