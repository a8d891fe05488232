"""With HiSparse each of eight tensor-parallel ranks keeps its own copy of the indexer's pages.

Ranks hold the same indexer rows, and vLLM stores such rows once (``replicated_layout``). Whether it
may is asked of all cache groups, also of those that are never offloaded: resident and hot specs
are no ``AttentionSpec``, so ``kv_cache_groups_tp_replicas`` answers 1 for all of them. On 0.30 the
layout asks for exactly one cache group.
"""

from __future__ import annotations

from copy import copy
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest.mock import PropertyMock, patch

from tests.upstream.outcome import run
from tests.upstream.stock import Shape, stock_engine

RANKS = 8


def replicas(groups: list[Any]) -> int | None:
    """vLLM's own count; ``None`` before 0.31, which has none."""
    for name in ("kv_cache_planning", "kv_cache_utils"):
        if find_spec(f"vllm.v1.core.{name}") is not None:
            module = import_module(f"vllm.v1.core.{name}")
            if hasattr(module, "kv_cache_groups_tp_replicas"):
                return int(module.kv_cache_groups_tp_replicas(groups, RANKS))
    return None


def offloading_config(core: Any) -> Any:
    """The configuration that vLLM makes of this node for eight ranks of its ``mp`` executor."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
        build_offloading_config,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
        OffloadingConnector,
    )

    child = next(
        one for one in core.scheduler.connector._connectors if isinstance(one, OffloadingConnector)
    )
    config = copy(child._vllm_config)
    config.parallel_config = copy(config.parallel_config)
    config.parallel_config.tensor_parallel_size = RANKS
    config.parallel_config.world_size = RANKS
    config.parallel_config.distributed_executor_backend = "mp"
    cache = copy(core.scheduler.kv_cache_config)
    cache.kv_tp_replicas = replicas(cache.kv_cache_groups)
    model = type(config.model_config)
    with (
        patch.object(model, "use_mla", new_callable=PropertyMock, return_value=True),
        patch.object(model, "get_total_num_kv_heads", return_value=1),
    ):
        return build_offloading_config(config, cache)


def reproduce() -> str | None:
    with stock_engine(Shape()) as core:
        groups = core.scheduler.kv_cache_config.kv_cache_groups
        alone = [one for one in groups if one.role is not None and "INDEXER" in str(one.role)]
        assert len(alone) == 1
        if offloading_config(core).replicated_layout:
            return None
        by_all, by_indexer = replicas(groups), replicas(alone)
        found = f"{RANKS} ranks keep {RANKS} copies of each indexer page."
        if by_all is None:
            return f"{found} vLLM asks for one cache group; there are {len(groups)}."
        return (
            f"{found} Ranks that hold equal rows: {by_indexer} by the indexer's group, which is "
            f"all that is offloaded, {by_all} by all {len(groups)} groups, which is what vLLM asks."
        )


if __name__ == "__main__":
    run(reproduce)
