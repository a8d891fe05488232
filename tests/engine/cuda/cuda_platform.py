"""Makes a vLLM without GPUs believe in eight H200, as far as its configuration and engine core go.

For a process of its own: what vLLM imports meanwhile remembers the platform. Only its tests use
this; the product leaves vLLM's platform alone.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from typing import Any

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

    # vLLM looks at models in processes of their own, to keep CUDA out of this one.
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
