"""A tiny DSA model for one GPU: real attention and indexer shapes, weights made up when loading.

For the GPU suite and for trying a card in minutes; its text means nothing. Head sizes, top-k and
block size are those that vLLM's sparse-MLA kernels are built for; everything else is small.
"""

from __future__ import annotations

from pathlib import Path

from hisparsed.engine.reference.tokenizer import EOS_TOKEN_ID, VOCAB_SIZE, write_model_folder

NAME = "hisparsed-tiny-dsa"
"""What stands as ``model`` in the node's document, and what clients ask for."""
MAX_POSITIONS = 32_768
ENGINE_ARGS: dict[str, object] = {"load_format": "dummy"}
"""Engine arguments that go with it."""


def tiny_config(*, layers: int = 8, index_topk: int = 512) -> dict[str, object]:
    """``config.json``: a GLM-5.x in miniature, every fourth layer with an indexer of its own."""
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
        "max_position_embeddings": MAX_POSITIONS,
        "vocab_size": VOCAB_SIZE,
        "bos_token_id": 256,
        "eos_token_id": EOS_TOKEN_ID,
        "torch_dtype": "bfloat16",
    }


def write_tiny_model(folder: Path) -> Path:
    """Write config and tokenizer under ``folder``; returns it. Raises ``OSError``."""
    return write_model_folder(folder, tiny_config())
