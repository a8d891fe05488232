"""The behaviour of stock vLLM with HiSparse, shown with vLLM's own functions.

It keeps a copy of the indexer's pages per rank, eight on eight ranks; hisparsed keeps one. Its
operator takes one hot-buffer size for all requests, fixed at start.
"""

from __future__ import annotations

from dataclasses import fields
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hot_worker import (
    BLOCK,
    LAYERS,
    LEASE_BLOCKS,
    REQUESTS,
    TOPK,
    HotWorker,
    UnpinnedTorch,
    without_cuda,
)
from ranks import Node
from vllm.v1.hisparse import runtime as vllm_runtime

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


SIZE, UNION, POSITIONS, ORDER, TABLE = 8, 9, 5, 6, 2
"""Where the operator takes region stride, union bound, held rows, their order, hot blocks."""


class RecordingTorch(UnpinnedTorch):
    """torch whose HiSparse operators note what they are given and do nothing."""

    def __init__(self) -> None:
        self.resolved: list[tuple[Any, ...]] = []
        self.ops = SimpleNamespace(
            _C_cache_ops=SimpleNamespace(
                hisparse_resolve_residency=lambda *given: self.resolved.append(given),
                hisparse_gather_compact=lambda *given: None,
            )
        )


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> RecordingTorch:
    without_cuda(monkeypatch)
    recorded = RecordingTorch()
    monkeypatch.setattr(vllm_runtime, "torch", recorded)
    return recorded


def stock_worker(monkeypatch: pytest.MonkeyPatch) -> HotWorker:
    """The miniature worker, its runtimes left as vLLM made them."""
    monkeypatch.setattr("hot_worker.install", lambda *_, **__: SimpleNamespace())
    return HotWorker(seed=1)


def resolve(worker: HotWorker) -> None:
    for layer in LAYERS:
        handle = worker.handles[layer]
        handle.decode_batch = True
        handle.runtime.begin_forward()
        handle.swap_in(
            torch.zeros(1, dtype=torch.int32),
            worker.source,
            torch.zeros(1, TOPK, dtype=torch.int32),
            block_size=BLOCK,
            num_valid_rows=torch.ones(1),
        )


def test_the_operator_gets_one_size_whatever_a_request_has_leased(
    recording: RecordingTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = stock_worker(monkeypatch)
    for blocks in (LEASE_BLOCKS, 2):
        worker.hot_input.zero_()
        worker.hot_input[:, 0, :blocks] = torch.arange(1, 1 + blocks)
        resolve(worker)
    assert len(recording.resolved) == 6, "three index groups, two steps"
    for given in recording.resolved:
        assert (given[SIZE], given[UNION]) == (LEASE_BLOCKS * BLOCK, TOPK)
        assert given[POSITIONS].shape == (REQUESTS, LEASE_BLOCKS * BLOCK)
        assert given[ORDER].shape == (REQUESTS, LEASE_BLOCKS * BLOCK)
        per_request = [one for one in given if torch.is_tensor(one) and one.shape == (REQUESTS,)]
        assert len(per_request) == 1, "only the state row is told request by request"


def test_slots_beyond_a_short_lease_would_be_used_all_the_same(
    recording: RecordingTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of a state row names every slot of the one size, so blocks that went back too."""
    worker = stock_worker(monkeypatch)
    resolve(worker)
    order = recording.resolved[0][ORDER]
    assert sorted(order[0].tolist()) == list(range(LEASE_BLOCKS * BLOCK))
    assert recording.resolved[0][TABLE].shape[1] == LEASE_BLOCKS


def test_the_size_is_that_of_the_configuration(recording: RecordingTorch) -> None:
    """vLLM takes it from there when a layer is made, before KV blocks are counted."""
    config = SimpleNamespace(
        attention_config=SimpleNamespace(
            hisparse_config=SimpleNamespace(device_buffer_size=320, eager_host_mirror=True)
        ),
        speculative_config=None,
        num_speculative_tokens=0,
        uniform_decode_query_len=1,
    )
    resolved = vllm_runtime.ResolvedHiSparseConfig.from_vllm_config(config, 64)
    assert resolved.device_buffer_size == 320
    config.attention_config.hisparse_config.device_buffer_size = 63
    with pytest.raises(ValueError, match="must cover every decode query"):
        vllm_runtime.ResolvedHiSparseConfig.from_vllm_config(config, 64)
