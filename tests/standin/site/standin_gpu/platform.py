"""vLLM's CUDA platform with eight H200 that are not there."""

from __future__ import annotations

from typing import Any

import torch

from standin_gpu.device import CARD_BYTES, CARDS, missing_extensions

missing_extensions()

from vllm.platforms.cuda import CudaPlatformBase  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402


class StandInPlatform(CudaPlatformBase):  # type: ignore[misc]
    """As vLLM's, but collectives go over gloo and operators are the CPU's."""

    dist_backend = "gloo"
    dispatch_key = "CPU"

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
        return CARD_BYTES

    @classmethod
    def is_fully_connected(cls, physical_device_ids: list[int]) -> bool:
        return True

    @classmethod
    def device_count(cls) -> int:
        return CARDS

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return 132

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "standin_gpu.worker.StandInCommunicator"

    @classmethod
    def use_custom_allreduce(cls) -> bool:
        return False

    @classmethod
    def get_all_device_numa_nodes(cls) -> Any:
        return None

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        # vLLM looks at models in processes of their own, to keep CUDA out of this one.
        from vllm.model_executor.models import registry

        registry._run_in_subprocess = lambda look: look()

    @classmethod
    def import_kernels(cls) -> None:
        from vllm.platforms.cpu import CpuPlatform

        CpuPlatform.import_kernels()
        for name in (
            "cutlass_scaled_mm_supports_fp8",
            "cutlass_scaled_mm_supports_block_fp8",
            "cutlass_scaled_mm_supports_fp4",
            "cutlass_group_gemm_supported",
        ):
            setattr(torch.ops._C, name, lambda *_: False)
        from standin_gpu.install import cache_operators

        cache_operators()

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        super().check_and_update_config(vllm_config)
        from standin_gpu.install import rest_while_waiting

        rest_while_waiting()
        parallel = vllm_config.parallel_config
        if parallel.worker_cls == "vllm.v1.worker.gpu_worker.Worker":
            parallel.worker_cls = "standin_gpu.worker.StandInWorker"

    @classmethod
    def log_warnings(cls) -> None:
        """There is nothing to warn of."""
