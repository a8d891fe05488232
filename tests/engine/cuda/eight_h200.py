"""The published node without its GPUs: GLM-5.3's shapes, and a vLLM that sees eight H200.

``GLM_CONFIG`` is a ``config.json`` as far as anything here reads it. ``believe_in_gpus`` goes as
far as vLLM's configuration and engine core do. Use it in a separate process: modules that vLLM
imports then remember the platform. Only tests use it; the product leaves vLLM's platform alone.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from typing import Any

GLM_CONFIG: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 78,
    "num_nextn_predict_layers": 1,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "index_topk": 2048,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 1_000_000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "max_position_embeddings": 202_752,
    "vocab_size": 154_880,
    "torch_dtype": "bfloat16",
}


GPU_MEMORY_BYTES = 141 * 2**30


class _AnythingGoes(types.ModuleType):
    """Stands for an extension module that only CUDA builds have; nothing of it is called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


def believe_in_gpus(architectures: Sequence[str]) -> None:
    """``architectures``: the models that are looked at afterwards.

    Their modules, and those of the connectors, are imported first, while vLLM still knows that
    there are no kernels to load.
    """
    for name in ("vllm._C_stable_libtorch", "vllm.vllm_flash_attn"):
        sys.modules.setdefault(name, _AnythingGoes(name))
    import vllm.config.vllm as config_module
    import vllm.distributed.kv_transfer.kv_connector.v1.hisparse.connector
    import vllm.distributed.kv_transfer.kv_connector.v1.multi_connector
    import vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector
    import vllm.model_executor.layers.quantization.utils.w8a8_utils
    import vllm.v1.hisparse.runtime as runtime_module
    from vllm import platforms
    from vllm.model_executor.models import registry

    # vLLM inspects models in separate processes, to keep CUDA out of this one.
    registry._run_in_subprocess = lambda look: look()
    for architecture in architectures:
        model = registry.ModelRegistry.models[architecture]
        if registry._try_inspect_model_cls(architecture, model) is None:
            raise RuntimeError(f"{architecture} cannot be looked at by this vLLM")
    config_module.HAS_TRITON = True
    platforms._current_platform = runtime_module.current_platform = _eight_gpus()


def _eight_gpus() -> Any:
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class EightGpus(CudaPlatformBase):  # type: ignore[misc]
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(9, 0)

        @classmethod
        def has_device_capability(cls, capability: Any, device_id: int = 0) -> bool:
            wanted = capability if isinstance(capability, tuple) else divmod(capability, 10)
            return bool(wanted <= (9, 0))

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H200"

        @classmethod
        def get_device_uuid(cls, device_id: int = 0) -> str:
            return f"GPU-{device_id}"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return GPU_MEMORY_BYTES

        @classmethod
        def is_fully_connected(cls, physical_device_ids: list[int]) -> bool:
            return True

        @classmethod
        def device_count(cls) -> int:
            return 8

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 132

        @classmethod
        def log_warnings(cls) -> None:
            """There is nothing to warn of."""

    return EightGpus()
