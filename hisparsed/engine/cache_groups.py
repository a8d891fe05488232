"""What the engine control needs to know of vLLM's cache groups and connectors when it is built."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from hisparsed.engine.chunks import ChunkLayout
from hisparsed.engine.offload import LentOffloadingManager


def find_offloading_scheduler(connector: Any) -> Any:
    """The scheduler half of vLLM's offloading connector. Raises ``TypeError`` without one."""
    children = getattr(connector, "sub_connectors", [connector])
    for child in children:
        if isinstance(child, OffloadingConnector) and child.connector_scheduler is not None:
            return child.connector_scheduler
    raise TypeError("no OffloadingConnector among the configured KV connectors")


def find_offload_manager(connector: Any) -> LentOffloadingManager:
    """The offloading manager of the scheduler's connector. Raises ``TypeError`` for another."""
    manager = find_offloading_scheduler(connector).manager
    if isinstance(manager, LentOffloadingManager):
        return manager
    raise TypeError(
        f"the offloading connector uses {type(manager).__name__}; its spec_name must "
        "be one of hisparsed's"
    )


def chunk_layout(config: Any, source_group: int, copies: int = 1) -> ChunkLayout:
    """How the indexer group's chunks, all ``copies`` of one side by side, lie in blocks of the
    HiSparse source group before it."""
    source = config.kv_cache_groups[source_group]
    indexer = config.kv_cache_groups[source_group + 1]
    layers = len(source.layer_names)
    return ChunkLayout(
        layers=layers,
        slice_bytes=_group_bytes(source) // layers,
        chunk_bytes=_group_bytes(indexer) * copies,
    )


def _group_bytes(group: Any) -> int:
    """Bytes of one block over all layers of a cache group, flattened or not."""
    specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    if specs is not None:
        return sum(int(specs[name].page_size_bytes) for name in group.layer_names)
    return int(group.kv_cache_spec.page_size_bytes) * len(group.layer_names)
