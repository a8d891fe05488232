"""``HandoffConnector``: the hand-over behind vLLM's KV-connector interface.

A child of MultiConnector between HiSparse and offloading: what is elsewhere is fetched before
the offload pool is asked. Both halves only translate; see ``scheduler`` and ``worker``.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.v1.hisparse.coordinator import get_hisparse_coordinator
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from hisparsed.engine.reference.handoff.messages import (
    HandoffAddress,
    HandoffWorkerMetadata,
    address_from,
)
from hisparsed.engine.reference.handoff.scheduler import HandoffScheduler
from hisparsed.engine.reference.handoff.stats import HandoffPromMetrics, HandoffStats
from hisparsed.engine.reference.handoff.worker import HandoffOptions, HandoffWorker
from hisparsed.engine.reference.store import KVStore

NAME = "HandoffConnector"


class HandoffConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Options come in ``kv_connector_extra_config``, named as in ``HandoffOptions``."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        self._options = HandoffOptions(
            produces=transfer.is_kv_producer,
            consumes=transfer.is_kv_consumer,
            **transfer.kv_connector_extra_config,
        )
        self._worker: HandoffWorker | None = None
        self._scheduler = HandoffScheduler(
            produces=self._options.produces,
            consumes=self._options.consumes,
            engine_id=str(transfer.engine_id),
            peers=self._options.peers,
            block_size=int(vllm_config.cache_config.block_size),
        )

    # --- the worker's half ------------------------------------------------------------

    @property
    def worker(self) -> HandoffWorker:
        if self._worker is None:
            raise RuntimeError("the executor has not attached its store to the connector")
        return self._worker

    def attach(self, store: KVStore) -> None:
        """The executor's bytes; from here on the node listens. Raises ``OSError``."""
        try:
            self._worker = HandoffWorker(store, self._options)
        except OSError as error:
            raise OSError(
                f"disaggregation: {self._options.host}:{self._options.port} cannot be listened "
                f"at: {error.strerror or error}; choose a free port and an address of this machine"
            ) from error

    def get_handshake_metadata(self) -> HandoffAddress | None:
        return self.worker.address

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.worker.start_step(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Fetched prefixes are whole before their request is scheduled."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Rows are read from the pools when a decode node asks for them."""

    def wait_for_save(self) -> None:
        """Nothing is saved during a forward."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = self.worker.take_results()
        return KVConnectorTransferResults(
            finished_recving=results.received,
            failed_recving=results.failed,
        )

    def build_connector_worker_meta(self) -> HandoffWorkerMetadata | None:
        return self.worker.take_news()

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()

    # --- the scheduler's half ---------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        coordinator = get_hisparse_coordinator(kv_cache_manager)
        self._scheduler.hold_blocks_of(
            coordinator.get_host_block_pool(), kv_cache_manager.block_pool
        )

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        self._scheduler.listen_at(address_from(metadata))

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        groups: tuple[int, ...] = self._kv_cache_config.transfer_group_ids
        return groups

    def on_new_request(self, request: Any) -> None:
        self._scheduler.request_added(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tokens = self._scheduler.matched_tokens(request, num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self._scheduler.take_metadata()

    def update_connector_output(self, connector_output: Any) -> None:
        news: HandoffWorkerMetadata | None = connector_output.kv_connector_worker_meta
        if news is not None:
            self._scheduler.told(news)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduler.finished(request, block_ids)

    def has_pending_push_work(self) -> bool:
        return self._scheduler.has_work()

    # --- what was counted -------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        counts = self._scheduler.take_counts()
        return HandoffStats(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        return HandoffStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> HandoffPromMetrics:
        return HandoffPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


if NAME not in KVConnectorFactory._registry:
    # MultiConnector looks its children's statistics up by name, module path or not.
    KVConnectorFactory.register_connector(NAME, __name__, NAME)
