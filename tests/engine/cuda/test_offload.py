"""The offloading spec in a worker: finds HiSparse's pool, agrees with the scheduler.

The spec makes no pool. vLLM's own HiSparse worker and connector objects hold the reference node's
host pool.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from copy import copy, deepcopy
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conversations import (
    EngineShape,
    apply,
    build_engine,
    converse,
    core_of,
    make_conversations,
    report,
)
from ranks import SlowLane, Stream


def hisparse_worker_of(store: Any, kv_cache_config: Any) -> Any:
    """An initialised ``HiSparseConnectorWorker`` on a private pool, as far as hisparsed's worker
    reads it."""
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


pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def core(folder: Path) -> Any:
    return core_of(build_engine(folder, EngineShape(gpu_blocks=420)))


@pytest.fixture
def kv_transfer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Sets the process' KV connector to MultiConnector over the given children."""
    from vllm.distributed.kv_transfer import kv_transfer_state

    def put(*children: Any) -> None:
        multi = SimpleNamespace(sub_connectors=list(children))
        monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", multi)

    return put


def offloading_of(core: Any) -> Any:
    """vLLM's offloading worker object of the running reference node."""
    return core.model_executor._connectors._offload


def make_spec(core: Any, **extra: Any) -> Any:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
        build_offloading_config,
    )
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    offloading = offloading_of(core)
    vllm_config = copy(offloading.vllm_config)
    vllm_config.kv_transfer_config = deepcopy(vllm_config.kv_transfer_config)
    vllm_config.kv_transfer_config.kv_connector_extra_config = {
        "spec_name": "CudaOffloadingSpec",
        "spec_module_path": "hisparsed.engine.cuda.offload",
        "cpu_bytes_to_use": 1,
        **extra,
    }
    return OffloadingSpecFactory.create_spec(
        build_offloading_config(vllm_config, offloading.kv_cache_config)
    )


def worker_with(core: Any, spec: Any) -> Any:
    """vLLM's own registration of the reference node's indexer caches with the spec."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
        OffloadingConnectorWorker,
    )

    offloading = offloading_of(core)
    connector = OffloadingConnectorWorker(spec, offloading.vllm_config, offloading.kv_cache_config)
    connector.register_kv_caches(core.model_executor._store.indexer_caches())
    return connector


@pytest.fixture
def hisparse(core: Any) -> Any:
    return hisparse_worker_of(core.model_executor._store, offloading_of(core).kv_cache_config)


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> list[SlowLane]:
    """Takes the place of CUDA streams."""
    from hisparsed.engine.cuda import offload

    made: list[SlowLane] = []

    def lane(calls: Any, *, source_is_stable: bool, others: Any = tuple) -> SlowLane:
        made.append(SlowLane(Stream(), others=others()))
        return made[-1]

    monkeypatch.setattr(offload, "CudaLane", lane)
    monkeypatch.setattr(offload, "CudaCalls", lambda device: None)
    return made


class ForbiddenError(Exception):
    """Memory was pinned, mapped or given back."""


def forbid_host_memory_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any, **__: Any) -> Any:
        raise ForbiddenError

    for module, names in (
        ("hisparse.runtime", ("pin_tensor", "allocate_pinned_host_pool", "SharedOffloadRegion")),
        ("kv_offload.cpu.spec", ("SharedOffloadRegion", "CPUOffloadingWorker")),
        ("kv_offload.cpu.gpu_worker", ("host_register", "host_unregister", "pin_mmap_region")),
        ("kv_offload.cpu.host_register", ("host_register", "host_unregister")),
        ("simple_kv_offload.cuda_mem_ops", ("pin_tensor",)),
    ):
        # Not every version has each of them.
        if find_spec(f"vllm.v1.{module}") is not None:
            place = import_module(f"vllm.v1.{module}")
            for name in names:
                monkeypatch.setattr(place, name, forbidden, raising=False)
    monkeypatch.setattr(torch.cuda, "cudart", forbidden)
    for name in ("empty", "zeros", "ones", "full", "tensor"):
        make = getattr(torch, name)

        def unpinned(*args: Any, make: Any = make, **how: Any) -> Any:
            if how.get("pin_memory"):
                raise ForbiddenError
            return make(*args, **how)

        monkeypatch.setattr(torch, name, unpinned)
    monkeypatch.setattr(torch.Tensor, "pin_memory", forbidden)


def test_nothing_is_pinned_or_allocated_when_the_worker_is_made_nor_while_it_serves(
    core: Any, hisparse: Any, kv_transfer: Any, lanes: list[SlowLane], monkeypatch: Any
) -> None:
    from vllm.v1.kv_offload.base import GPULoadStoreSpec
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

    kv_transfer(connector_of(hisparse))
    spec = make_spec(core)
    forbid_host_memory_calls(monkeypatch)
    worker = worker_with(core, spec).worker
    store = core.model_executor._store
    page = torch.arange(-64, 64, dtype=torch.int8)[: store.index_rows[0][7].numel()]
    store.index_rows[0][7].view(-1)[: page.numel()] = page
    on_gpu = GPULoadStoreSpec([7], group_sizes=[1], block_indices=[0])
    assert worker.submit_store(1, on_gpu, CPULoadStoreSpec([25]))
    worker.wait({1})
    store.index_rows[0][7].zero_()
    assert worker.submit_load(2, CPULoadStoreSpec([25]), on_gpu)
    worker.wait({2})
    assert [result.job_id for result in worker.get_finished()] == [1, 2]
    assert torch.equal(store.index_rows[0][7].view(-1)[: page.numel()], page)
    worker.shutdown()
    ends = [store.host.data_ptr(), store.host.data_ptr() + store.host.numel()]
    (_, targets, lengths), *_ = lanes[0].batches
    assert ends[0] <= targets.min()
    assert (targets + lengths).max() <= ends[1]


def test_worker_and_scheduler_lay_chunks_out_alike(core: Any) -> None:
    from hisparsed.engine.cuda.offload import scheduler_layout

    offloading = offloading_of(core)
    ledger = core.scheduler.hisparsed.host.offload.layout
    assert scheduler_layout(offloading.kv_cache_config) == ledger


def test_a_worker_is_made_once(
    core: Any, hisparse: Any, kv_transfer: Any, lanes: list[SlowLane]
) -> None:
    kv_transfer(connector_of(hisparse))
    spec = make_spec(core)
    first = worker_with(core, spec).worker
    assert worker_with(core, spec).worker is first
    assert len(lanes) == 3


def test_vllm_asks_every_rank_to_store_and_ours_decide(core: Any) -> None:
    spec = make_spec(core)
    assert spec.replicated_layout is False


def test_a_layout_for_all_parallelisms_is_refused(core: Any) -> None:
    with pytest.raises(ValueError, match=r"kv_connector_extra_config\.canonical_layout: lent"):
        make_spec(core, canonical_layout=True)


def test_without_a_hisparse_connector_the_worker_says_so(core: Any, kv_transfer: Any) -> None:
    kv_transfer(SimpleNamespace())
    with pytest.raises(RuntimeError, match="no HiSparseConnector is configured next to"):
        worker_with(core, make_spec(core))


def test_without_any_connector_the_worker_says_so(core: Any) -> None:
    with pytest.raises(RuntimeError, match="this process has no KV connector"):
        worker_with(core, make_spec(core))


def test_hisparse_must_have_its_pool_first(core: Any, hisparse: Any, kv_transfer: Any) -> None:
    del hisparse.host_caches
    kv_transfer(connector_of(hisparse))
    with pytest.raises(RuntimeError, match="list HiSparseConnector before OffloadingConnector"):
        worker_with(core, make_spec(core))


def test_a_registration_inside_a_slice_is_refused_before_anything_is_copied(
    core: Any, hisparse: Any, kv_transfer: Any, lanes: list[SlowLane]
) -> None:
    whole = hisparse.pinned_host_pools[0]
    hisparse.pinned_host_pools = [whole[:1000], whole[1000:]]
    kv_transfer(connector_of(hisparse))
    with pytest.raises(ValueError, match="cuts a slice of layer 0"):
        worker_with(core, make_spec(core))
    assert lanes == []


def test_more_groups_than_the_indexers_are_refused(core: Any) -> None:
    from vllm.v1.kv_offload.base import CanonicalKVCaches

    from hisparsed.engine.cuda.offload import device_runs

    with pytest.raises(ValueError, match="2 cache groups are offloaded"):
        device_runs(CanonicalKVCaches([], [[], []]))


def test_layers_of_unequal_rows_are_refused(hisparse: Any) -> None:
    from hisparsed.engine.cuda.offload import pool_of

    first, *others = hisparse.host_caches
    hisparse.host_caches = (first[:, :64].contiguous(), *others)
    with pytest.raises(ValueError, match=r"layers have slices of \[1024, 2048\] B"):
        pool_of(hisparse)
    hisparse.host_caches = (first[:32], *others)
    with pytest.raises(ValueError, match="layer 0 has 32 rows"):
        pool_of(hisparse)


def test_a_shared_pool_is_read_from_vllms_region(hisparse: Any) -> None:
    from hisparsed.engine.cuda.offload import pool_of

    pool = hisparse.pinned_host_pools[0]
    start = pool.data_ptr()
    hisparse.shared_host_region = SimpleNamespace(
        base_tensor=pool, pinned_addresses=[start, start + 40_960]
    )
    hisparse.pinned_host_pools = []
    hisparse.is_host_writer = False
    found = pool_of(hisparse)
    assert found.shared
    assert not found.writes
    assert found.registrations == (
        (start, 40_960),
        (start + 40_960, pool.numel() - 40_960),
    )
    assert found.write_streams() == ()


def test_what_waits_for_the_next_step_is_put_on_hisparses_stream_once(hisparse: Any) -> None:
    """vLLM's own method, called before a store and again by the step itself."""
    from hisparsed.engine.cuda.offload import pool_of

    if not hasattr(hisparse, "_finish_previous_step"):
        pytest.skip("before 0.31 nothing waits")
    enqueued: list[tuple[int, ...]] = []
    hisparse._draft_layers = (7,)
    hisparse._draft_mirror_pending = True
    hisparse._enqueue_row_dma = enqueued.append
    pool = pool_of(hisparse)
    pool.enqueue_pending_writes()
    pool.enqueue_pending_writes()
    assert enqueued == [(7,)]


def test_a_hisparse_step_begins_with_what_waits() -> None:
    """So that it may be done a little earlier: the step before's event and rows are in place."""
    from vllm.distributed.kv_transfer.kv_connector.v1.hisparse.worker import (
        HiSparseConnectorWorker,
    )

    if not hasattr(HiSparseConnectorWorker, "_finish_previous_step"):
        pytest.skip("before 0.31 nothing waits")
    source = inspect.getsource(HiSparseConnectorWorker.start_step)
    order = [
        source.index(statement)
        for statement in (
            "self._finish_previous_step()",
            "previous_host_write_event = self.host_write_event",
            "self._set_row_mirrors(",
        )
    ]
    assert order == sorted(order)


def test_the_ranges_that_vllm_registers_cut_no_slice() -> None:
    """GLM-5.x: 79 layers in 2 TiB, 256 GiB a registration; addresses only."""
    from vllm.v1.hisparse.runtime import (
        _hisparse_registration_ranges,
        get_hisparse_host_block_stride,
    )

    from hisparsed.engine.cuda.copies import HostSlices, require_whole_slices

    slice_bytes, layers = 64 * 656, 79
    stride = get_hisparse_host_block_stride(slice_bytes * layers, use_shared_host_pool=True)
    blocks = (2 << 40) // stride
    found = _hisparse_registration_ranges([slice_bytes * blocks] * layers, blocks, stride)
    assert len(found) >= 8
    base = 1 << 45
    addresses = tuple(base + layer * slice_bytes * blocks for layer in range(layers))
    host = HostSlices(addresses, slice_bytes, blocks)
    registrations = [(base + start, end - start) for start, end in found]
    require_whole_slices(host, registrations)
    # The same ranges moved by one row are what a copy would straddle.
    moved = [(start + 656, size) for start, size in registrations[1:]]
    with pytest.raises(ValueError, match="cuts a slice"):
        require_whole_slices(host, [(base, registrations[0][1] + 656), *moved])


@pytest.mark.long
def test_conversations_on_these_copies_give_the_reference_nodes_tokens(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stock scheduler, real KV, host blocks lent and recalled at random, copies that end late."""
    from hisparsed.engine.cuda.offload import (
        CudaChunkWorker,
        Lanes,
        chunk_ranges,
        device_runs,
        pool_of,
    )
    from hisparsed.engine.reference import connectors

    def talk(engine: Any, between_steps: Any) -> Any:
        talks = make_conversations(count=8, turns=3, first=400, later=80, answer=16, seed=5)
        return converse(engine, talks, between_steps)

    engine = build_engine(folder, EngineShape())
    apply(engine, {"offload_target_blocks": 700})
    expected = talk(engine, lambda step: None)

    lanes = Lanes(SlowLane(Stream()), SlowLane(Stream()), SlowLane(Stream()))

    def get_worker(spec: Any, kv_caches: Any) -> Any:
        pool = pool_of(hisparse_worker_of(spec.store, None))
        runs, blocks = device_runs(kv_caches)
        layout = connectors.reference_chunk_layout(spec.store)
        return CudaChunkWorker(
            chunk_ranges(layout, pool, runs, blocks),
            lanes,
            writes=pool.writes,
            before_store=pool.enqueue_pending_writes,
        )

    monkeypatch.setattr(connectors.ReferenceOffloadingSpec, "get_worker", get_worker)
    engine = build_engine(folder, EngineShape(gpu_blocks=420, host_budget_bytes=20 << 20))
    budget = report(engine)["geometry"]["budget_blocks"]
    rng = random.Random(11)

    def move(step: int) -> None:
        for lane in (lanes.store, lanes.load):
            if lane.stream.queued and rng.random() < 0.5:
                lane.stream.run_one()
        if step % 4 == 0:
            apply(engine, {"offload_target_blocks": rng.randrange(budget // 8, budget // 2)})

    found = talk(engine, move)
    assert found.answers == expected.answers
    assert found.hit_tokens > 0
    assert min(len(lane.batches) for lane in (lanes.store, lanes.load)) > 5
