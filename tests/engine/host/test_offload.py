"""A finished request's store is flushed when any group of the GPU pool takes its block."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conversations import EngineShape, build_engine, core_of

pytestmark = pytest.mark.engine

JOB, BLOCK = 5, 77


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return core_of(build_engine(Path(tmp_path_factory.mktemp("engine")), EngineShape()))


def offloading_of(core: Any) -> Any:
    from hisparsed.engine.host.offload import find_offloading_scheduler

    return find_offloading_scheduler(core.scheduler.connector)


def flushed_when(core: Any, group: int, *, new_request: bool) -> set[int]:
    """The jobs that a pass flushes when it gives ``BLOCK`` to ``group``, while ``JOB`` stores from
    it."""
    from vllm.v1.core.sched.output import SchedulerOutput

    offloading = offloading_of(core)
    groups = len(core.scheduler.kv_cache_config.kv_cache_groups)
    blocks = tuple([BLOCK] if index == group else [0] for index in range(groups))
    request = SimpleNamespace(
        update_offload_keys=lambda: None,
        update_block_id_groups=lambda new: None,
        group_states=(),
    )
    offloading._req_status["other"] = request
    offloading._block_id_to_pending_jobs[BLOCK] = {JOB}
    output = SchedulerOutput.make_empty()
    if new_request:
        output.scheduled_new_reqs = [SimpleNamespace(req_id="other", block_ids=blocks)]
    else:
        cached = output.scheduled_cached_reqs
        cached.req_ids, cached.new_block_ids = ["other"], [blocks]
    try:
        flushed: set[int] = offloading.build_connector_meta(output).jobs_to_flush
    finally:
        del offloading._req_status["other"]
        del offloading._block_id_to_pending_jobs[BLOCK]
    return flushed


@pytest.mark.parametrize("new_request", [True, False])
def test_a_block_that_any_gpu_group_takes_is_flushed_first(core: Any, new_request: bool) -> None:
    groups = core.scheduler.kv_cache_config.kv_cache_groups
    flushed = [flushed_when(core, index, new_request=new_request) for index in range(len(groups))]
    assert flushed == [set() if group.host_resident else {JOB} for group in groups]
    assert len(groups) == 6


def test_vllm_alone_looks_at_the_indexer_group_only(core: Any) -> None:
    """Why there is a fence. If this fails, vLLM has mended it and the fence can go."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        OffloadingConnectorScheduler,
    )

    offloading = offloading_of(core)
    fenced = type(offloading)
    offloading.__class__ = OffloadingConnectorScheduler
    try:
        flushed = [flushed_when(core, index, new_request=True) for index in range(6)]
    finally:
        offloading.__class__ = fenced
    assert flushed == [set(), {JOB}, set(), set(), set(), set()]


def test_the_null_block_is_nobodys(core: Any) -> None:
    offloading = offloading_of(core)
    offloading._block_id_to_pending_jobs[0] = {JOB + 1}
    try:
        assert flushed_when(core, 1, new_request=True) == {JOB}
    finally:
        del offloading._block_id_to_pending_jobs[0]
