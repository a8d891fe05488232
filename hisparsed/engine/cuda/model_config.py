"""The facts in a model's ``config.json`` about its KV, and the config of the tiny model.

``ModelFacts`` are facts only, with the bytes that follow from them; they are read without vLLM
where the model is a local folder. What is impossible with them is in ``checks``.

The tiny model is a DSA model for one GPU whose weights are made up when it is loaded. It serves
the GPU suite and trying a card in minutes; its text means nothing. Head sizes, top-k and block
size are those that vLLM's sparse-MLA kernels are built for; everything else is small.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hisparsed.engine.reference.model_folder import EOS_TOKEN_ID, VOCAB_SIZE, write_model_folder
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
    """Layers that have their own indexer; the others use its top-k."""
    max_positions: int | None
    latent_values: int
    rope_values: int
    index_values: int
    draft_layers: int
    """MTP layers that come with the model."""
    weights_bytes: int | None = None
    nested_topk: bool = False
    """``index_topk`` is only in ``text_config``."""

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
                f"model: {model} is not a folder; name one with a config.json, or a name that vLLM "
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
        nested_topk=topk is not None and config.get("index_topk") is None,
    )


def _leads(text: Mapping[str, Any], layer: int) -> bool:
    """Whether the layer has an indexer, by the keys of index sharing that vLLM reads."""
    pattern = text.get("index_topk_pattern")
    if pattern is not None:
        return bool(layer >= len(pattern) or pattern[layer] != "S")
    every = int(text.get("index_topk_freq") or 1)
    offset = int(text.get("index_skip_topk_offset", 2))
    return max(layer - offset + 1, 0) % every == 0


TINY_MODEL = "hisparsed-tiny-dsa"
"""The ``model`` in the node's document, and the name that clients ask for."""
TINY_MAX_POSITIONS = 32_768
TINY_ENGINE_ARGS: dict[str, object] = {"load_format": "dummy"}
"""Engine arguments that go with it."""


def tiny_config(*, layers: int = 8, index_topk: int = 512) -> dict[str, object]:
    """``config.json``: a GLM-5.x in miniature, every fourth layer with its own indexer."""
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": 1,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": 512,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "index_topk": index_topk,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
        "first_k_dense_replace": layers,
        "moe_intermediate_size": 512,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 1_000_000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "max_position_embeddings": TINY_MAX_POSITIONS,
        "vocab_size": VOCAB_SIZE,
        "bos_token_id": 256,
        "eos_token_id": EOS_TOKEN_ID,
        "torch_dtype": "bfloat16",
    }


def write_tiny_model(folder: Path) -> Path:
    """Write config and tokenizer under ``folder``; returns it. Raises ``OSError``."""
    return write_model_folder(folder, tiny_config())
