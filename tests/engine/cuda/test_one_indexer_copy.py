"""Copies of the indexer's pages on eight ranks: stock vLLM keeps eight, ours one.

Calls vLLM's own planning, configuration and worker; only the copies themselves are recorded.
"""

from __future__ import annotations

from dataclasses import fields
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
from ranks import Node

RANKS = 8
INDEXER_PAGE = 64 * 132


def hisparse_groups() -> list[Any]:
    """vLLM's groups for eight sparse layers of which every fourth has an indexer."""
    import torch
    from vllm.config import HiSparseConfig
    from vllm.v1.hisparse.layout import get_hisparse_kv_cache_groups
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, SparseCacheRole

    # What vLLM's models set; 0.30 looks at the kind of layer alone.
    names = {field.name for field in fields(MLAAttentionSpec)}
    replicated = {"max_tp_shards": 1} if "max_tp_shards" in names else {}

    def spec(row_bytes: int, role: Any, leader: bool) -> Any:
        return MLAAttentionSpec(
            block_size=64,
            num_kv_heads=1,
            head_size=row_bytes,
            dtype=torch.uint8,
            cache_role=role,
            is_index_group_leader=leader,
            **replicated,
        )

    specs = {f"sparse.{i}": spec(656, SparseCacheRole.SPARSE, i % 4 == 0) for i in range(8)}
    specs |= {f"indexer.{i}": spec(132, SparseCacheRole.INDEXER, False) for i in (0, 4)}
    config = SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=HiSparseConfig(device_buffer_size=4096)),
        model_config=SimpleNamespace(hf_config=SimpleNamespace(index_topk=2048)),
        speculative_config=None,
        num_speculative_tokens=0,
    )
    groups = get_hisparse_kv_cache_groups(config, specs)
    assert groups is not None
    return groups


def tp_replicas(groups: list[Any]) -> int | None:
    """vLLM's own count; None before 0.31, which has none."""
    for module in ("kv_cache_planning", "kv_cache_utils"):
        if find_spec(f"vllm.v1.core.{module}") is not None:
            place = import_module(f"vllm.v1.core.{module}")
            if hasattr(place, "kv_cache_groups_tp_replicas"):
                return int(place.kv_cache_groups_tp_replicas(groups, RANKS))
    return None


def offloading_config(groups: list[Any], rank: int) -> Any:
    """vLLM's own translation, on one node of eight ranks in vLLM's ``mp`` executor."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
        build_offloading_config,
    )
    from vllm.v1.kv_cache_interface import KVCacheConfig

    cache = KVCacheConfig(
        num_blocks=100,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        hisparse_host_num_blocks=50,
        hisparse_host_block_stride=64 * 656 * 8,
        hisparse_shared_host_pool=True,
    )
    cache.kv_tp_replicas = tp_replicas(groups)
    parallel = SimpleNamespace(
        tensor_parallel_size=RANKS,
        pipeline_parallel_size=1,
        prefill_context_parallel_size=1,
        decode_context_parallel_size=1,
        world_size=RANKS,
        rank=rank,
        nnodes_within_dp=1,
        distributed_executor_backend="mp",
        data_parallel_index=0,
        data_parallel_size=1,
        data_parallel_rank_local=None,
    )
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config={"cpu_bytes_to_use": 64 << 20}, engine_id="engine"
        ),
        parallel_config=parallel,
        cache_config=SimpleNamespace(
            block_size=64,
            hash_block_size=None,
            prefix_match_unit=None,
            enable_prefix_caching=True,
            cache_dtype="fp8_ds_mla",
            kv_cache_layout="BLHNC",
        ),
        model_config=SimpleNamespace(
            use_mla=True,
            model="model",
            dtype="bfloat16",
            max_model_len=4096,
            get_total_num_kv_heads=lambda: 1,
        ),
        kv_events_config=None,
        use_v2_model_runner=True,
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
    )
    return build_offloading_config(config, cache)


class Recorder:
    """Stands where vLLM's copies are."""

    def __init__(self) -> None:
        self.stores: list[int] = []

    def submit_store(self, job_id: int, source: Any, target: Any) -> bool:
        self.stores.append(job_id)
        return True

    def wait(self, job_ids: set[int]) -> None:
        """Recorded copies have ended."""


def test_hisparse_turns_vllms_single_copy_layout_off() -> None:
    groups = hisparse_groups()
    indexers = [group for group in groups if group.layer_names == ["indexer.0", "indexer.4"]]
    assert (tp_replicas(indexers), tp_replicas(groups)) in {(RANKS, 1), (None, None)}
    assert not offloading_config(groups, rank=0).replicated_layout


def test_stock_vllm_stores_a_copy_a_rank() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
        OffloadingConnectorMetadata,
        TransferJob,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
        OffloadingConnectorWorker,
    )
    from vllm.v1.kv_offload.base import GPULoadStoreSpec
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

    groups = hisparse_groups()
    recorders = [Recorder() for _ in range(RANKS)]
    for rank, recorder in enumerate(recorders):
        spec = CPUOffloadingSpec(offloading_config(groups, rank))
        # Room for a chunk of every rank is what the budget is divided by.
        assert spec.kv_bytes_per_chunk >= RANKS * 2 * INDEXER_PAGE
        worker = OffloadingConnectorWorker(spec, None, None)
        worker.worker = recorder
        job = TransferJob(
            "request",
            GPULoadStoreSpec([3], group_sizes=[1], block_indices=[0]),
            CPULoadStoreSpec([1]),
        )
        worker.prepare_store_kv(OffloadingConnectorMetadata({}, {7: job}))
        worker.start_kv_transfers(OffloadingConnectorMetadata({}, {}))
    assert [recorder.stores for recorder in recorders] == [[7]] * RANKS


@pytest.mark.parametrize(("shared", "copies"), [(True, 1), (False, RANKS)])
def test_ours_stores_one_copy_a_pool(shared: bool, copies: int) -> None:
    node = Node(RANKS, host_blocks=4, gpu_blocks=4, shared=shared)
    node.manager.lend([1])
    for rank in node.ranks:
        rank.write_page(2, bytes(range(40)))
    node.store(1, 2)
    node.run_everything()
    assert sum(len(rank.store.batches) for rank in node.ranks) == copies
    node.load(1, 3)
    node.run_everything()
    assert [rank.page(3) for rank in node.ranks] == [bytes(range(40))] * RANKS
