"""What the engine control needs to know of vLLM's cache groups and connectors when it is built."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from hisparsed.engine.chunks import ChunkLayout
from hisparsed.engine.offload import LentOffloadingManager


def find_offload_manager(connector: Any) -> LentOffloadingManager:
    """The offloading manager of the scheduler's connector. Raises ``TypeError`` for another."""
    children = getattr(connector, "sub_connectors", [connector])
    for child in children:
        if isinstance(child, OffloadingConnector) and child.connector_scheduler is not None:
            manager = child.connector_scheduler.manager
            if isinstance(manager, LentOffloadingManager):
                return manager
            raise TypeError(
                f"the offloading connector uses {type(manager).__name__}; its spec_name must "
                "be one of hisparsed's"
            )
    raise TypeError("no OffloadingConnector among the configured KV connectors")


def chunk_layout(config: Any, source_group: int) -> ChunkLayout:
    """How the indexer group's chunks lie in blocks of the HiSparse source group before it."""
    source = config.kv_cache_groups[source_group]
    indexer = config.kv_cache_groups[source_group + 1]
    layers = len(source.layer_names)
    return ChunkLayout(
        layers=layers,
        slice_bytes=_group_bytes(source) // layers,
        chunk_bytes=_group_bytes(indexer),
    )


def _group_bytes(group: Any) -> int:
    """Bytes of one block over all layers of a cache group, flattened or not."""
    specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    if specs is not None:
        return sum(int(specs[name].page_size_bytes) for name in group.layer_names)
    return int(group.kv_cache_spec.page_size_bytes) * len(group.layer_names)
