"""What a model's `config.json` says about its KV: read without vLLM where the folder is local.

Facts only, and bytes that follow from them; what is impossible with them is ``checks``' to say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hisparsed.errors import UserError

BLOCK_TOKENS = 64
"""Tokens of a KV block: what vLLM's sparse-MLA kernels read pages of."""
_SCALE_BYTES = 4
_FP8_TILE = 128
"""Values that share a scale, in latent rows and in indexer rows."""


@dataclass(frozen=True)
class ModelFacts:
    """``None`` where the config does not say. ``weights_bytes``: of all files together."""

    model_type: str
    index_topk: int | None
    layers: int
    index_leaders: int
    """Layers that have an indexer of their own; the others use its top-k."""
    max_positions: int | None
    latent_values: int
    rope_values: int
    index_values: int
    draft_layers: int
    """MTP layers that come with the model."""
    weights_bytes: int | None = None

    def row_bytes(self, kv_cache_dtype: str) -> int:
        """One row of one sparse-MLA layer."""
        if kv_cache_dtype == "fp8_ds_mla":
            scales = self.latent_values // _FP8_TILE * _SCALE_BYTES
            return self.latent_values + scales + 2 * self.rope_values
        return 2 * (self.latent_values + self.rope_values)

    @property
    def index_row_bytes(self) -> int:
        """One row of one indexer: FP8 values and their scales."""
        return self.index_values + self.index_values // _FP8_TILE * _SCALE_BYTES

    def kv_layers(self, *, drafts: bool) -> int:
        """Sparse-MLA layers that have KV; an MTP layer has its own, and an indexer too."""
        return self.layers + (self.draft_layers if drafts else 0)

    def indexers(self, *, drafts: bool) -> int:
        return self.index_leaders + (self.draft_layers if drafts else 0)


def read_model(model: str) -> ModelFacts | None:
    """Facts of a local folder; ``None`` for a name that only vLLM can look up.

    Raises ``UserError`` for a folder without a usable `config.json`.
    """
    folder = Path(model)
    if not folder.is_dir():
        if folder.is_absolute() or model.startswith("."):
            raise UserError(
                f"model: {model} is no folder; name one with a config.json, or a name that vLLM "
                "can download"
            )
        return None
    try:
        document = json.loads((folder / "config.json").read_text("utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"model: {folder} has no config.json; name the folder that has it and the weights"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"model: {folder}/config.json cannot be read: {error}") from error
    if not isinstance(document, Mapping):
        raise UserError(f"model: {folder}/config.json is not a mapping")
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    try:
        return facts_of(document, weights_bytes=weights or None)
    except (AttributeError, TypeError, ValueError) as error:
        raise UserError(
            f"model: {folder}/config.json: {error}; layers, top-k and head sizes in it are numbers"
        ) from error


def facts_of(config: Mapping[str, Any], *, weights_bytes: int | None = None) -> ModelFacts:
    """Facts of a config as `config.json` has it."""
    text = config.get("text_config") or config
    layers = int(text.get("num_hidden_layers", 0))
    topk = text.get("index_topk")
    return ModelFacts(
        model_type=str(text.get("model_type") or config.get("model_type") or "unknown"),
        index_topk=None if topk is None else int(topk),
        layers=layers,
        index_leaders=sum(_leads(text, layer) for layer in range(layers)),
        max_positions=text.get("max_position_embeddings"),
        latent_values=int(text.get("kv_lora_rank") or 512),
        rope_values=int(text.get("qk_rope_head_dim") or 64),
        index_values=int(text.get("index_head_dim") or 128),
        draft_layers=int(text.get("num_nextn_predict_layers") or 0),
        weights_bytes=weights_bytes,
    )


def _leads(text: Mapping[str, Any], layer: int) -> bool:
    """Whether the layer has an indexer, by the keys of index sharing that vLLM reads."""
    pattern = text.get("index_topk_pattern")
    if pattern is not None:
        return bool(layer >= len(pattern) or pattern[layer] != "S")
    every = int(text.get("index_topk_freq") or 1)
    offset = int(text.get("index_skip_topk_offset", 2))
    return max(layer - offset + 1, 0) % every == 0
