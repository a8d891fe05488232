"""vLLM's HiSparse connector where our kernels run: tells workers of leases, and installs them.

The class keeps vLLM's name, by which a connector is looked up. Nothing of vLLM's own work is
replaced: each override calls it and adds to it.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.hisparse.connector import (
    HiSparseConnector as StockConnector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hisparse.connector import (
    HiSparseConnectorMetadata,
)

from hisparsed.engine.cuda.residency.extension import hot_cache_groups
from hisparsed.engine.cuda.residency.install import install
from hisparsed.engine.cuda.residency.leases import LeaseNews, SentLeases
from hisparsed.engine.cuda.residency.node import WorkerResidency
from hisparsed.engine.scratch import scratch_block_ids


class LeasedMetadata(HiSparseConnectorMetadata):  # type: ignore[misc]
    """A step's metadata that also tells of leases."""

    lease_news: LeaseNews


class HiSparseConnector(StockConnector):  # type: ignore[misc]
    """Scheduler side: adds the news of leases. Worker side: our resolver."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._hisparsed_sent = SentLeases()
        self._hisparsed_node: WorkerResidency | None = None
        self._hisparsed_config = (vllm_config, kv_cache_config)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata = super().build_connector_meta(scheduler_output)
        managers = self.connector_scheduler.coordinator.hot_managers
        metadata.__class__ = LeasedMetadata
        metadata.lease_news = self._hisparsed_sent.news(
            scheduler_output.num_scheduled_tokens,
            fresh=[new.req_id for new in scheduler_output.scheduled_new_reqs],
            ended={*scheduler_output.finished_req_ids, *(scheduler_output.preempted_req_ids or ())},
            held=lambda name: tuple(
                len(manager.req_to_blocks.get(name, ())) for manager in managers
            ),
        )
        return metadata

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        vllm_config, kv_cache_config = self._hisparsed_config
        layer_groups = [
            (index, name)
            for index, group_id in enumerate(hot_cache_groups(kv_cache_config))
            for name in kv_cache_config.kv_cache_groups[group_id].layer_names
        ]
        options = vllm_config.additional_config.get("hisparsed", {})
        self._hisparsed_node = install(
            self.connector_worker.cache_handles,
            [index for index, _ in layer_groups],
            scratch=scratch_block_ids(int(options.get("scratch_blocks", 0))),
        )

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        metadata = self._get_connector_metadata()
        if self._hisparsed_node is None or not isinstance(metadata, LeasedMetadata):
            raise RuntimeError("a step came before the KV caches, or from another connector")
        self._hisparsed_node.before_forward(
            metadata.lease_news,
            kwargs.get("request_ids") or (),
            kwargs.get("request_state_indices"),
        )

    def shutdown(self) -> None:
        """vLLM unpins and closes the pool here, which views of it would prevent: ours, and those
        that its own worker still has."""
        if self._hisparsed_node is not None:
            self._hisparsed_node.release()
        if self.connector_worker is not None:
            self.connector_worker.host_caches = ()
        super().shutdown()
