"""vLLM's GPU worker, in a process where what it cannot have is stood in for.

The module puts the stand-ins where vLLM's modules look, then takes vLLM's class.
"""

from __future__ import annotations

from typing import Any

from standin_gpu import evidence
from standin_gpu.device import on_host
from standin_gpu.install import install

install()

from vllm.v1.worker.gpu_worker import Worker  # noqa: E402


class StandInWorker(Worker):  # type: ignore[misc]
    """vLLM's, as it is, except that host memory is told from a card's by its pinning."""

    def init_device(self) -> None:
        evidence.watch_calls()
        super().init_device()

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        runner = self.model_runner
        runner.kv_caches = [cache for cache in runner.kv_caches if not on_host(cache.data_ptr())]

    def shutdown(self) -> None:
        evidence.tell_calls()
        super().shutdown()
