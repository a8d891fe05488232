"""The random work of a proof: requests, contexts, top-k positions of every step, padding.

Both sides get the same tensors. Selections drift as a model's do, by scores that change a little
from step to step; the rows of one request overlap, as those of drafts. Knows nothing of vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hisparsed.engine.cuda.proof.question import HotSizes

_MOST_CONTEXT = 32_768
"""Positions of the longest request; enough for several hot buffers of GLM-5.x."""
_MOST_REQUESTS = 64
_MEMORY_SHARE = 8
"""Both sides together take at most one part in this many of the GPU's free memory."""
RESIDENT_PAGES = 4
"""Pages of a request that are on the GPU too."""
SECOND_GROUP_LAYERS = 1


@dataclass(frozen=True)
class Work:
    """Blocks and rows as in ``HotSizes``. ``context``: positions of the longest request."""

    sizes: HotSizes
    requests: int
    context: int

    @classmethod
    def within(cls, sizes: HotSizes, free_bytes: int) -> Work:
        """As many requests as the node may run, or as ``free_bytes`` of the GPU allow."""
        block = sizes.block_tokens
        context = min(_MOST_CONTEXT, sizes.max_model_len) // block * block
        work = cls(sizes, min(_MOST_REQUESTS, sizes.max_num_seqs), max(context, 2 * block))
        while work.requests > 1 and 2 * work.slab_bytes > free_bytes // _MEMORY_SHARE:
            work = cls(sizes, work.requests // 2, work.context)
        return work

    @property
    def rows(self) -> int:
        """Decode rows of a full step."""
        return self.requests * self.sizes.query_len

    @property
    def start_blocks(self) -> int:
        return -(-self.sizes.start_rows // self.sizes.block_tokens)

    @property
    def most_blocks(self) -> int:
        return max(self.start_blocks, -(-self.sizes.most_rows // self.sizes.block_tokens))

    @property
    def least_blocks(self) -> int:
        """Of a lease that holds what one step may select."""
        union = self.sizes.query_len * self.sizes.topk
        return min(self.start_blocks, -(-union // self.sizes.block_tokens))

    @property
    def page_bytes(self) -> int:
        return self.sizes.block_tokens * self.sizes.row_bytes

    @property
    def layers(self) -> int:
        """Of both index groups."""
        return self.sizes.layers + SECOND_GROUP_LAYERS

    @property
    def slab_blocks(self) -> int:
        return 1 + self.requests * (self.most_blocks + RESIDENT_PAGES)

    @property
    def slab_bytes(self) -> int:
        return self.slab_blocks * self.layers * self.page_bytes

    @property
    def table_pages(self) -> int:
        """Width of the block tables: the node's, not what is used of them."""
        return max(self.context, self.sizes.max_model_len) // self.sizes.block_tokens + 1

    @property
    def shared_pages(self) -> int:
        """Host blocks that all requests read; the last page of each is its own."""
        return self.context // self.sizes.block_tokens - 1

    @property
    def host_blocks(self) -> int:
        return 1 + self.shared_pages + self.requests

    def tokens(self, request: int) -> int:
        """Its context: the first has the longest, the last less than one top-k."""
        if request and request == self.requests - 1:
            return max(2, min(self.context, self.sizes.topk // 2))
        least = min(self.context, 2 * self.sizes.topk)
        return self.context - (self.context - least) * request // max(1, self.requests)


@dataclass(frozen=True)
class WorkStep:
    """``topk`` int32 [rows, K] of a full step, -1 behind a short context and in padding rows;
    ``requests``: how many are real, the rest is padding."""

    topk: torch.Tensor
    requests: int


def work_steps(work: Work, device: torch.device, *, seed: int) -> Iterator[WorkStep]:
    """Without end. Every third step has padding rows, where there are requests to omit."""
    sizes = work.sizes
    generator = torch.Generator(device).manual_seed(seed)
    drift = _noise(work, generator, device)
    lengths = torch.tensor([work.tokens(one) for one in range(work.requests)], device=device)
    beyond = torch.arange(work.context, device=device).unsqueeze(0) >= lengths.unsqueeze(1)
    drift.masked_fill_(beyond, -torch.inf)
    width = min(sizes.topk, work.context)
    number = 0
    while True:
        drift.mul_(0.95).add_(_noise(work, generator, device), alpha=0.3)
        topk = torch.full((work.rows, sizes.topk), -1, dtype=torch.int32, device=device)
        for draft in range(sizes.query_len):
            scores = drift + 0.2 * _noise(work, generator, device)
            best = torch.topk(scores, width, dim=1)
            chosen = torch.where(best.values == -torch.inf, -1, best.indices)
            topk[draft :: sizes.query_len, :width] = chosen.to(torch.int32)
        real = work.requests - (work.requests // 4 if number % 3 == 2 else 0)
        topk[real * sizes.query_len :] = -1
        yield WorkStep(topk, real)
        number += 1


def _noise(work: Work, generator: torch.Generator, device: torch.device) -> torch.Tensor:
    shape = (work.requests, work.context)
    return torch.randn(shape, generator=generator, device=device)
