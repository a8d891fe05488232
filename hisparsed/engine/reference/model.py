"""The reference model: fixed random integer weights and an integer-exact forward pass.

Sparse MLA with a top-k indexer. Every weight is a small integer held in float32, and every
activation that meets one is an integer too, so each dot product is exact whatever the order of
summation: the same token sequence gives the same logits for any batch, chunking or placement of
its KV. It is neither fast nor trained; it proves that no byte of KV is lost.

It does not know where KV rows are: a ``KVAccess`` writes a step's rows and returns the rows that
the indexer selected.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from hisparsed.engine.reference.model_folder import INDEX_DIM, ROW_BYTES, ReferenceGeometry

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


_INT8_MAX = 127.0
_INDEX_QUERY_MAX = 31.0
_NORM_LEVEL = 32.0
_SALIENCE_DIMS = 28
"""Index dimensions whose query is constant: a key's own weight, which makes selections of
neighbouring steps overlap as those of trained indexers do."""
_SCORE_SHIFT = 64.0
"""Attention score distance that one step of the weight table spans."""


class KVAccess(Protocol):
    """The KV of one step's tokens, in the order of the batch. ``T`` tokens, ``K`` top-k."""

    def write_rows(self, layer: int, rows: torch.Tensor) -> None:
        """Store int8 ``[T, ROW_BYTES]``, the latents of this step's tokens."""

    def write_index_rows(self, group: int, keys: torch.Tensor, scales: torch.Tensor) -> None:
        """Store int8 ``[T, INDEX_DIM]`` keys and float32 ``[T]`` scales."""

    def select(self, group: int, query: torch.Tensor, head_weight: torch.Tensor) -> None:
        """Score all context keys, keep each token's top-k and locate their rows.

        ``query`` float32 integers ``[T, index_heads, INDEX_DIM]``; ``head_weight`` float32
        integers ``[T, index_heads]``, positive.
        """

    def read_rows(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Selected rows int8 ``[T, K, ROW_BYTES]`` and validity bool ``[T, K]``."""


def _quantise(values: torch.Tensor, scale: float, bound: float = _INT8_MAX) -> torch.Tensor:
    return torch.clamp(torch.round(values * scale), -bound, bound)


def _normalise(hidden: torch.Tensor) -> torch.Tensor:
    """Integer RMS norm ``[T, hidden]``; the square sum is exact in float64."""
    squares = hidden.double().square().sum(dim=-1, keepdim=True)
    rms = torch.sqrt(squares / hidden.shape[-1]).clamp(min=1.0)
    scaled = torch.round(hidden.double() * _NORM_LEVEL / rms)
    return torch.clamp(scaled, -_INT8_MAX, _INT8_MAX).float()


def index_scores(
    query: torch.Tensor, head_weight: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """Indexer scores before the key scale: ``sum_h w_h relu(q_h . k)``.

    ``query`` ``[T, heads, INDEX_DIM]``, ``head_weight`` ``[T, heads]``, ``keys``
    ``[N, INDEX_DIM]`` or batched ``[T, N, INDEX_DIM]``; all integers in float32.
    Returns ``[T, N]``; exact, below 2**24.
    """
    if keys.dim() == 2:
        dots = torch.matmul(query, keys.t())
    else:
        dots = torch.bmm(query, keys.transpose(1, 2))
    return (torch.relu(dots) * head_weight.unsqueeze(-1)).sum(dim=1)


class ReferenceModel:
    """Stateless apart from its weights; ``forward`` is a function of tokens and KV."""

    def __init__(self, geometry: ReferenceGeometry, weights: ReferenceWeights) -> None:
        self.geometry = geometry
        self.weights = weights

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, kv: KVAccess) -> torch.Tensor:
        """Residual stream after the last layer, ``[T, hidden]``.

        ``tokens`` and ``positions`` are int64 ``[T]``; rows of all tokens are written
        layer by layer through ``kv`` before they are read.
        """
        weights = self.weights
        # Absolute positions make every row distinct: a greedy decode cannot fall into a
        # loop in which a wrong KV row would go unnoticed.
        hidden = weights.embedding.index_select(0, tokens)
        hidden = hidden + weights.position.index_select(0, positions)
        for group in range(self.geometry.index_groups):
            for layer in self.geometry.group_layers(group):
                normed = _normalise(hidden)
                if layer == self.geometry.group_layers(group)[0]:
                    self._index(group, weights.indexers[group], normed, kv)
                hidden = hidden + self._attend(layer, weights.layers[layer], normed, kv)
                hidden = hidden + self._feed_forward(weights.layers[layer], hidden)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Integer logits ``[N, vocab]`` in float32 for rows of ``forward``'s result."""
        return torch.matmul(_normalise(hidden), self.weights.head)

    def _index(
        self, group: int, weights: IndexerWeights, normed: torch.Tensor, kv: KVAccess
    ) -> None:
        tokens = normed.shape[0]
        raw_key = torch.matmul(normed, weights.key)
        scale = raw_key.abs().amax(dim=-1).clamp(min=1.0) / _INT8_MAX
        key = torch.round(raw_key / scale.unsqueeze(-1))
        kv.write_index_rows(group, key.to(torch.int8), scale)
        query = _quantise(torch.matmul(normed, weights.query), 1 / 100, _INDEX_QUERY_MAX)
        query = query.view(tokens, self.geometry.index_heads, INDEX_DIM)
        query[..., :_SALIENCE_DIMS] = _INDEX_QUERY_MAX
        head_weight = torch.clamp(
            torch.round(torch.matmul(normed, weights.head_weight) / 200) + 8, 1, 15
        )
        kv.select(group, query, head_weight)

    def _attend(
        self,
        layer: int,
        weights: LayerWeights,
        normed: torch.Tensor,
        kv: KVAccess,
    ) -> torch.Tensor:
        tokens, heads = normed.shape[0], self.geometry.heads
        latent = _quantise(torch.matmul(normed, weights.latent), 1 / 40)
        kv.write_rows(layer, latent.to(torch.int8))
        query = _quantise(torch.matmul(normed, weights.query), 1 / 40)
        query = query.view(tokens, heads, ROW_BYTES)
        rows, valid = kv.read_rows(layer)
        values = rows.float()
        scores = torch.bmm(query, values.transpose(1, 2))
        scores = scores.masked_fill(~valid.unsqueeze(1), float("-inf"))
        best = scores.amax(dim=-1, keepdim=True)
        distance = torch.floor((best - scores) / _SCORE_SHIFT)
        table = self.weights.attention_table
        distance = torch.clamp(distance, max=table.numel() - 1).long()
        attention = table[distance].masked_fill(~valid.unsqueeze(1), 0.0)
        mixed = torch.bmm(attention, values)
        mean = torch.round(mixed / attention.sum(dim=-1, keepdim=True))
        return _quantise(torch.matmul(mean.view(tokens, -1), weights.output), 1 / 64)

    def _feed_forward(self, weights: LayerWeights, hidden: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(_quantise(torch.matmul(_normalise(hidden), weights.up), 1 / 40))
        return _quantise(torch.matmul(inner, weights.down), 1 / 64)
