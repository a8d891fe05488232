"""vLLM's own HiSparse worker and connector objects, holding the reference node's host pool."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def hisparse_worker_of(store: Any, kv_cache_config: Any) -> Any:
    """An initialised ``HiSparseConnectorWorker`` on a private pool, as far as ours looks at it."""
    from vllm.distributed.kv_transfer.kv_connector.v1.hisparse.worker import (
        HiSparseConnectorWorker,
    )

    worker = HiSparseConnectorWorker(None, kv_cache_config)
    worker.kernel_block_size = store.block_size
    worker.host_num_blocks = store.host_blocks
    worker.host_caches = tuple(store.host_rows)
    worker.pinned_host_pools = [store.host]
    worker.shared_host_region = None
    worker.is_host_writer = True
    worker.dma_stream = None
    worker._draft_mirror_pending = False
    worker._post_forward_transfers = []
    worker.cache_handles = [SimpleNamespace(runtime=SimpleNamespace(eager_host_mirror=True))]
    return worker


def connector_of(worker: Any) -> Any:
    from vllm.distributed.kv_transfer.kv_connector.v1.hisparse.connector import HiSparseConnector

    connector = object.__new__(HiSparseConnector)
    connector.connector_worker = worker
    return connector
