"""Fixed random integer weights of the reference model, made from one seed.

Every weight is a small integer held in float32, and every activation that meets one is an
integer too, so each dot product is exact in float32 whatever the order of summation: the
same token sequence gives the same logits for any batch, chunking or placement of its KV.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hisparsed.engine.reference.geometry import INDEX_DIM, ROW_BYTES, ReferenceGeometry

ATTENTION_WEIGHT_LEVELS = 1024
"""Attention weights are integers 0..1024: 64 of them times 127 stay below 2**24."""


@dataclass(frozen=True)
class LayerWeights:
    """One layer. Shapes are ``[in, out]``; integers in float32."""

    query: torch.Tensor  # [hidden, heads * ROW_BYTES]
    latent: torch.Tensor  # [hidden, ROW_BYTES]
    output: torch.Tensor  # [heads * ROW_BYTES, hidden]
    up: torch.Tensor  # [hidden, intermediate]
    down: torch.Tensor  # [intermediate, hidden]


@dataclass(frozen=True)
class IndexerWeights:
    """The indexer of one index group."""

    query: torch.Tensor  # [hidden, index_heads * INDEX_DIM]
    key: torch.Tensor  # [hidden, INDEX_DIM]
    head_weight: torch.Tensor  # [hidden, index_heads]


@dataclass(frozen=True)
class ReferenceWeights:
    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    indexers: tuple[IndexerWeights, ...]
    head: torch.Tensor  # [hidden, vocab]
    position: torch.Tensor  # [max_model_len, hidden], added to the embedding
    attention_table: torch.Tensor  # [4096] integer weight by integer score distance


def _integers(rng: np.random.Generator, bound: int, *shape: int) -> torch.Tensor:
    values = rng.integers(-bound, bound + 1, size=shape, dtype=np.int64)
    return torch.from_numpy(values.astype(np.float32))


def make_weights(geometry: ReferenceGeometry) -> ReferenceWeights:
    """All weights of ``geometry``, a pure function of its seed."""
    rng = np.random.Generator(np.random.PCG64(geometry.seed))
    hidden, heads = geometry.hidden, geometry.heads
    embedding = _integers(rng, 64, geometry.vocab, hidden)
    layers = tuple(
        LayerWeights(
            query=_integers(rng, 7, hidden, heads * ROW_BYTES),
            latent=_integers(rng, 7, hidden, ROW_BYTES),
            output=_integers(rng, 7, heads * ROW_BYTES, hidden),
            up=_integers(rng, 7, hidden, geometry.intermediate),
            down=_integers(rng, 7, geometry.intermediate, hidden),
        )
        for _ in range(geometry.layers)
    )
    indexers = tuple(
        IndexerWeights(
            query=_integers(rng, 7, hidden, geometry.index_heads * INDEX_DIM),
            key=_integers(rng, 7, hidden, INDEX_DIM),
            head_weight=_integers(rng, 3, hidden, geometry.index_heads),
        )
        for _ in range(geometry.index_groups)
    )
    distance = np.arange(4096)
    table = np.rint(ATTENTION_WEIGHT_LEVELS * np.exp2(-distance / 64.0))
    return ReferenceWeights(
        embedding=embedding,
        layers=layers,
        indexers=indexers,
        head=_integers(rng, 7, hidden, geometry.vocab),
        position=_integers(rng, 64, geometry.max_model_len, hidden),
        attention_table=torch.from_numpy(table.astype(np.float32)),
    )
