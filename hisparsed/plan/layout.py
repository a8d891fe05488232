"""How vLLM lays out KV memory for a described node: groups, block bytes, copies, padding.

Arithmetic only. A node has two layouts: one with the rows that the model really has, one with the
rows that vLLM's published concurrency calculator counts. Also the sizes of a scaled part of a
node, as the simulated node runs it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from hisparsed.config.node_description import NodeDescription

HOST_ALIGNMENT = 4096
"""Shared host memory is cut on page boundaries."""
TAIL_PAGES = 2
"""Pages at the end of a request that stay on the GPU."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Bytes of one block of ``block_tokens`` tokens in each place, and what groups there are."""

    block_tokens: int
    topk: int
    hot_groups: int
    baseline_block_bytes: int
    """All KV on the GPU, without HiSparse."""
    gpu_block_bytes: int
    """A block of the GPU pool that HiSparse's groups share."""
    host_block_bytes: int
    chunk_bytes: int
    """One copy of a block of indexer KV in the offload pool."""
    copies: int
    gpu_kv_bytes: int
    gpu_blocks: int
    baseline_blocks: int

    def pages(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def hot_blocks(self, hot_rows: int) -> int:
        """GPU blocks of one request's hot buffer over all groups."""
        return self.hot_groups * self.pages(hot_rows)

    @property
    def host_token_bytes(self) -> float:
        return self.host_block_bytes / self.block_tokens

    @property
    def offload_token_bytes(self) -> float:
        """All copies of the indexer KV of a token."""
        return self.chunk_bytes * self.copies / self.block_tokens


def published_layout(node: NodeDescription) -> Layout:
    """What the published calculator counts: its rows, no padding, one copy."""
    return _layout(node, node.model.published_row_bytes, padded=False, copies=1)


def real_layout(node: NodeDescription, copies: int) -> Layout:
    """Memory that vLLM allocates: real rows, host memory in whole pages, ``copies`` of the
    indexer."""
    return _layout(node, node.model.row_bytes, padded=True, copies=copies)


def simulated_layout(node: NodeDescription) -> Layout:
    """Memory that a simulated node allocates: real rows, host memory without pages, one copy."""
    return _layout(node, node.model.row_bytes, padded=False, copies=1)


def stock_copies(node: NodeDescription) -> int:
    """Copies of the indexer that stock vLLM keeps with HiSparse: one per GPU."""
    return node.gpu.count


def _layout(node: NodeDescription, row_bytes: int, *, padded: bool, copies: int) -> Layout:
    model, tokens = node.model, node.engine.block_tokens
    page = row_bytes * tokens
    indexer = len(model.index_leaders()) * model.index_row_bytes * tokens
    source = model.layers * page
    groups = packed_groups(index_units(node), page, indexer)
    largest = max(indexer, *(layers * page for layers in groups))
    gpu_block = math.ceil(largest / page) * page
    chunk = indexer
    if padded:
        # All copies of a chunk are contiguous and padded once.
        chunk = math.ceil(_aligned(indexer * copies) / copies)
    return Layout(
        block_tokens=tokens,
        topk=model.topk,
        hot_groups=len(groups),
        baseline_block_bytes=source + indexer,
        gpu_block_bytes=gpu_block,
        host_block_bytes=_aligned(source) if padded else source,
        chunk_bytes=chunk,
        copies=copies,
        gpu_kv_bytes=node.gpu.kv_memory,
        gpu_blocks=node.gpu.kv_memory // gpu_block,
        baseline_blocks=node.gpu.kv_memory // (source + indexer),
    )


def index_units(node: NodeDescription) -> list[int]:
    """Layers of each index group: a leader and those that reuse its top-k."""
    leaders = [*node.model.index_leaders(), node.model.layers]
    return [end - start for start, end in pairwise(leaders)]


def packed_groups(units: list[int], page_bytes: int, indexer_bytes: int) -> list[int]:
    """Layers of each cache group: neighbouring units, while they fit next to an indexer page."""
    groups: list[int] = []
    current = 0
    for layers in units:
        if current and (current + layers) * page_bytes > indexer_bytes:
            groups.append(current)
            current = 0
        current += layers
    return [*groups, current] if current else groups


def _aligned(count: int) -> int:
    return -(-count // HOST_ALIGNMENT) * HOST_ALIGNMENT


def scaled_seqs(node: NodeDescription, scale: Fraction) -> int:
    """Requests that the part may run at once."""
    return max(1, math.ceil(node.engine.max_num_seqs * scale))


def step_tokens(node: NodeDescription, scale: Fraction) -> int:
    """Tokens of one step of the part; room for a step of every request at least."""
    least = max(2 * node.engine.block_tokens, scaled_seqs(node, scale) * node.query_len)
    return max(least, math.ceil(node.engine.max_num_batched_tokens * scale))
