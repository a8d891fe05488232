"""Shape of the reference model: a small sparse-MLA (DSA) transformer for the CPU node.

Read from the model folder's ``config.json`` (through vLLM's ``hf_config``), so that the
scheduler process, the API process and the executor agree on one source. Not a description
of any real checkpoint: only the ratios (index groups, indexer row to KV row) follow one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

ROW_BYTES = 128
"""Bytes of one sparse-MLA row: 128 int8 latents, one row a token and layer."""
INDEX_DIM = 64
INDEX_ROW_BYTES = INDEX_DIM + 4
"""Bytes of one indexer row: 64 int8 key values and one float32 scale."""


class HfConfig(Protocol):
    """The attributes that ``hisparsed.engine.reference.model_folder`` writes."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    vocab_size: int
    index_topk: int
    index_n_groups: int
    index_n_heads: int
    max_position_embeddings: int
    reference_seed: int


@dataclass(frozen=True)
class ReferenceGeometry:
    """Sizes of the reference model; all counts, no bytes.

    ``layers`` is split evenly into ``index_groups``; the first layer of each group owns an
    indexer, the others reuse its top-k.
    """

    layers: int
    index_groups: int
    hidden: int
    heads: int
    intermediate: int
    vocab: int
    index_topk: int
    index_heads: int
    max_model_len: int
    seed: int

    def __post_init__(self) -> None:
        if self.layers % self.index_groups:
            raise ValueError(
                f"{self.layers} layers do not divide into {self.index_groups} index groups"
            )
        if self.index_topk < 1:
            raise ValueError(f"index_topk must be at least 1, got {self.index_topk}")

    @property
    def layers_per_group(self) -> int:
        return self.layers // self.index_groups

    def group_layers(self, group: int) -> range:
        """Layer numbers of index group ``group``, leader first."""
        start = group * self.layers_per_group
        return range(start, start + self.layers_per_group)

    @classmethod
    def from_hf_config(cls, config: HfConfig) -> ReferenceGeometry:
        return cls(
            layers=config.num_hidden_layers,
            index_groups=config.index_n_groups,
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            intermediate=config.intermediate_size,
            vocab=config.vocab_size,
            index_topk=config.index_topk,
            index_heads=config.index_n_heads,
            max_model_len=config.max_position_embeddings,
            seed=config.reference_seed,
        )


def kv_layer_name(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.mla"


def indexer_layer_name(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.indexer"
