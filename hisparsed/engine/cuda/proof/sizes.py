"""From the node's document and the model's facts to the sizes that a proof is made with."""

from __future__ import annotations

from hisparsed.config.node import NodeConfig
from hisparsed.engine.cuda import checks
from hisparsed.engine.cuda.model_config import BLOCK_TOKENS, ModelFacts
from hisparsed.engine.cuda.proof.question import ChunkSizes, HotSizes

_MOST_REQUESTS = 256
"""vLLM's own default is at least this on GPUs of this class; the proof takes fewer anyway."""
_MOST_LAYERS = 8
"""Layers of one index group that are timed together."""


def hot_sizes(
    config: NodeConfig, model: ModelFacts, *, start_multiplier: float, most_multiplier: float
) -> HotSizes:
    """Multipliers in top-k: of the first lease, and the largest. The model has an indexer."""
    topk, cuda = int(model.index_topk or 0), config.cuda
    drafts = cuda.speculative_tokens > 0
    layers = -(-model.kv_layers(drafts=drafts) // max(1, model.indexers(drafts=drafts)))
    return HotSizes(
        topk=topk,
        query_len=1 + cuda.speculative_tokens,
        start_rows=checks.hot_rows(config, topk, start_multiplier),
        most_rows=checks.hot_rows(config, topk, max(start_multiplier, most_multiplier)),
        row_bytes=model.row_bytes(cuda.kv_cache_dtype),
        layers=min(_MOST_LAYERS, layers),
        max_num_seqs=cuda.max_num_seqs or _MOST_REQUESTS,
        max_model_len=cuda.max_model_len or model.max_positions or 2 * topk,
        block_tokens=BLOCK_TOKENS,
    )


def chunk_sizes(config: NodeConfig, model: ModelFacts) -> ChunkSizes:
    """Host blocks and indexer pages of the node."""
    drafts = config.cuda.speculative_tokens > 0
    return ChunkSizes(
        layers=model.kv_layers(drafts=drafts),
        slice_bytes=BLOCK_TOKENS * model.row_bytes(config.cuda.kv_cache_dtype),
        pages=model.indexers(drafts=drafts),
        page_bytes=BLOCK_TOKENS * model.index_row_bytes,
    )
