"""The two classes that vLLM loads by name where our kernels run.

``HotExtension`` is the ``worker_extension_cls``: vLLM mixes it into the worker class, and calls
come through ``collective_rpc`` between steps. Every rank does the same, and answers what it did.

``HiSparseConnector`` keeps vLLM's class name, by which a connector is looked up. It sends leases to
workers and installs the resolver. Each override calls vLLM's own method and adds to it.
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

from hisparsed.engine.cuda.residency.runtime import install, installed
from hisparsed.engine.cuda.residency.worker import LeaseUpdates, SentLeases, WorkerResidency
from hisparsed.engine.scratch import scratch_block_ids


class HotExtension:
    """Methods of a worker; ``model_runner`` is vLLM's."""

    model_runner: Any

    def hisparsed_hot_figures(self) -> dict[str, Any] | None:
        """The newest figures that are there; waits for no step."""
        return installed().report(self.model_runner.req_states.req_id_to_index)

    def hisparsed_resize_hot(self, leases: dict[str, int]) -> tuple[int, int]:
        """Shrink hot buffers to this many blocks of each hot group; requests shrunk, rows moved.

        The worker's block tables end there afterwards, so that blocks leased later follow. Where
        it raises, some may be shrunk: no further step is served.
        """
        node = installed()
        try:
            return self._resize_hot(node, leases)
        except Exception as error:
            node.doubt(f"shrinking hot buffers failed: {error}")
            raise

    def hisparsed_doubt_hot(self, reason: str) -> None:
        """Let no further step be served, which ends the engine."""
        installed().doubt(reason)

    def _resize_hot(self, node: WorkerResidency, leases: dict[str, int]) -> tuple[int, int]:
        runner = self.model_runner
        row_of = runner.req_states.req_id_to_index
        tables = runner.block_tables
        groups = hot_cache_groups(runner.kv_cache_config)
        # KV caches may be tensors for inference only, and worker calls come outside of it.
        with torch.inference_mode():
            moved = node.resize(
                leases, row_of, [tables.block_tables[group].gpu for group in groups]
            )
        rows = [(row_of[name], blocks) for name, blocks in leases.items() if name in row_of]
        for row, blocks in rows:
            for group in groups:
                held = tables.num_blocks.np[group, row]
                tables.num_blocks.np[group, row] = min(held, blocks)
        return len(rows), moved


def hot_cache_groups(kv_cache_config: Any) -> list[int]:
    """Ids of the cache groups that hold hot buffers, in vLLM's order."""
    from vllm.v1.kv_cache_interface import HiSparseHotSpec

    return [
        group_id
        for group_id, group in enumerate(kv_cache_config.kv_cache_groups)
        if isinstance(group.kv_cache_spec, HiSparseHotSpec)
    ]


class LeasedMetadata(HiSparseConnectorMetadata):  # type: ignore[misc]
    """A step's metadata that also has changed leases."""

    lease_updates: LeaseUpdates


class HiSparseConnector(StockConnector):  # type: ignore[misc]
    """Scheduler side: adds changed leases. Worker side: our resolver."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._hisparsed_sent = SentLeases()
        self._hisparsed_node: WorkerResidency | None = None
        self._hisparsed_config = (vllm_config, kv_cache_config)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata = super().build_connector_meta(scheduler_output)
        managers = self.connector_scheduler.coordinator.hot_managers
        metadata.__class__ = LeasedMetadata
        metadata.lease_updates = self._hisparsed_sent.updates(
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
            metadata.lease_updates,
            kwargs.get("request_ids") or (),
            kwargs.get("request_state_indices"),
        )

    def shutdown(self) -> None:
        """vLLM unpins and closes the pool here, which views of it would prevent: those of
        hisparsed, and those that its own worker still has."""
        if self._hisparsed_node is not None:
            self._hisparsed_node.release()
        if self.connector_worker is not None:
            self.connector_worker.host_caches = ()
        super().shutdown()
