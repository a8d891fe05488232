"""``HandoffConnector``: the hand-over behind vLLM's KV-connector interface.

A child of MultiConnector between HiSparse and offloading: prefixes on another node are fetched
before the offload pool is asked. Both halves only translate; see ``scheduler`` and ``worker``.

Hand-overs are counted on both sides for vLLM's own metrics page. Counts travel as vLLM's
connector stats: deltas from the engine, summed where they are read.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.hisparse.coordinator import get_hisparse_coordinator
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.metrics.utils import create_metric_per_engine

from hisparsed.engine.reference.handoff.scheduler import (
    HandoffAddress,
    HandoffScheduler,
    HandoffWorkerMetadata,
    address_from,
)
from hisparsed.engine.reference.handoff.worker import HandoffOptions, HandoffWorker
from hisparsed.engine.reference.store import KVStore

MEANINGS = {
    "offered": "Prefixes that were kept for a decode node.",
    "read": "Offered prefixes that a decode node has read, or needed nothing of.",
    "expired": "Offered prefixes that were not read within their lease.",
    "sent_bytes": "Row bytes sent to decode nodes.",
    "fetched": "Prefixes fetched from a prefill node, whole and checked.",
    "failed": "Prefixes that could not be fetched; their prompts were computed here.",
    "refused": "Calls with transfer parameters that cannot be right; computed here.",
    "fetched_tokens": "Prompt tokens that were fetched instead of computed.",
    "fetched_bytes": "Row bytes fetched from prefill nodes.",
    "recomputed_tokens": "Prompt tokens of failed fetches.",
}
"""Every count, and the help text of its metric."""
METRIC_PREFIX = "vllm:hisparsed_handoff_"
"""vLLM removes only collectors with its prefix when a new engine starts in the same process; others
would be registered twice."""


class HandoffStats(KVConnectorStats):  # type: ignore[misc]
    """``data``: counts by the names in ``MEANINGS``; absent is zero."""

    def reset(self) -> None:
        self.data: dict[str, int] = {}

    def add(self, counts: dict[str, int]) -> None:
        for name, count in counts.items():
            self.data[name] = self.data.get(name, 0) + count

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.add(other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        return {f"handoff {name}": count for name, count in self.data.items()}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class HandoffPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """One counter per name, registered once in the process that serves the metrics."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter = metric_types[Counter]
        self._counters = {
            name: create_metric_per_engine(
                counter(name=f"{METRIC_PREFIX}{name}", documentation=text, labelnames=labelnames),
                per_engine_labelvalues,
            )
            for name, text in MEANINGS.items()
        }

    def observe(self, transfer_stats_data: dict[str, int], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(count)


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
        return self.worker.take_updates()

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
        updates: HandoffWorkerMetadata | None = connector_output.kv_connector_worker_meta
        if updates is not None:
            self._scheduler.receive(updates)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduler.finished(request, block_ids)

    def has_pending_push_work(self) -> bool:
        return self._scheduler.has_work()

    # --- counts -------------------------------------------------------------

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
