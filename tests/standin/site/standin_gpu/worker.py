"""vLLM's GPU worker, in a process where what it cannot have is stood in for.

The module puts the stand-ins where vLLM's modules look, then takes vLLM's class.
"""

from __future__ import annotations

from typing import Any

from standin_gpu import evidence
from standin_gpu.device import on_host
from standin_gpu.install import install, tell_cards_from_host

install()

from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator  # noqa: E402
from vllm.v1.worker.gpu_worker import Worker  # noqa: E402


class StandInCommunicator(CpuCommunicator):  # type: ignore[misc]
    """Collectives over gloo: the CPU's own spin on shared memory, which two cores cannot bear."""

    def _all_group_ranks_share_shm_group_name(self) -> bool:
        return False


class StandInWorker(Worker):  # type: ignore[misc]
    """vLLM's, as it is, except that host memory is told from a card's by its pinning."""

    def init_device(self) -> None:
        evidence.watch_calls()
        super().init_device()

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        transfer = self.vllm_config.kv_transfer_config
        if transfer is not None and transfer.has_connector("NixlConnector"):
            tell_cards_from_host()
        super().initialize_from_config(kv_cache_config)
        runner = self.model_runner
        runner.kv_caches = [cache for cache in runner.kv_caches if not on_host(cache.data_ptr())]

    def shutdown(self) -> None:
        evidence.tell_calls()
        super().shutdown()
