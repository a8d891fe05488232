"""A call whose prefix comes back from the offload pool is admitted like any other.

vLLM asks for a resident page for the whole remainder of such a call, in every group, and waits
forever where the GPU pool is smaller than that.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conversations import (
    EngineShape,
    answer_of,
    apply,
    ask,
    build_engine,
    core_of,
    finish,
    report,
    text,
)

from hisparsed.engine.resident import CountingResidentManager
from hisparsed.engine.stall import StallLimits, StallWatch

pytestmark = pytest.mark.engine

PREFIX_TOKENS = 320
LONG_TOKENS = 1900
SHAPE = EngineShape(
    gpu_blocks=260, max_num_batched_tokens=128, max_num_seqs=4, max_multiplier=1, seed=11
)


def serve(engine: Any, name: str, prompt: list[int], max_steps: int = 400) -> tuple[list[int], int]:
    """The answer and its cached tokens; fails where the call does not end."""
    ask(engine, name, prompt, 4)
    output = finish(engine, max_steps)[name]
    return answer_of(output), int(output.num_cached_tokens or 0)


@pytest.fixture
def engine_with_an_offloaded_prefix(tmp_path: Path) -> Any:
    """Its host pool holds the prefix; the indexer pages of it are only in the offload pool."""
    engine = build_engine(tmp_path, SHAPE)
    apply(engine, {"offload_target_blocks": 200})
    serve(engine, "first", text(PREFIX_TOKENS, seed=1))
    serve(engine, "other", text(LONG_TOKENS, seed=2))
    return engine


def continued() -> list[int]:
    return [*text(PREFIX_TOKENS, seed=1), *text(LONG_TOKENS - PREFIX_TOKENS, seed=3)]


def test_a_long_call_with_an_offloaded_prefix_is_admitted(
    engine_with_an_offloaded_prefix: Any,
) -> None:
    _, cached = serve(engine_with_an_offloaded_prefix, "continued", continued())
    assert cached == PREFIX_TOKENS, "the prefix must come from the offload pool for this to count"


def test_without_our_manager_it_waits_for_ever_on_an_empty_node(
    engine_with_an_offloaded_prefix: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(CountingResidentManager, "get_num_blocks_to_allocate")
    monkeypatch.setattr(StallWatch, "step", lambda watch, facts: None)
    with pytest.raises(TimeoutError):
        serve(engine_with_an_offloaded_prefix, "continued", continued())
    requests = report(engine_with_an_offloaded_prefix)["requests"]
    assert (requests["running"], requests["waiting"]) == (0, 1)
    pool = core_of(engine_with_an_offloaded_prefix).scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "everything but the null block"


def test_a_wait_that_nobody_foresaw_is_found_and_the_call_recomputed(
    engine_with_an_offloaded_prefix: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(CountingResidentManager, "get_num_blocks_to_allocate")
    engine = engine_with_an_offloaded_prefix
    core_of(engine).scheduler.stall = StallWatch(StallLimits(after_s=0.0, between_s=0.0))
    _, cached = serve(engine, "continued", continued())
    assert cached == 0
    requests = report(engine)["requests"]
    assert (requests["stalls_total"], requests["stalls_resolved_total"]) == (1, 1)
    assert requests["stalls_given_up_total"] == 0


def test_a_call_that_nothing_helps_fails_and_the_next_one_is_served(
    engine_with_an_offloaded_prefix: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_with_an_offloaded_prefix
    scheduler = core_of(engine).scheduler
    scheduler.stall = StallWatch(StallLimits(after_s=0.0, between_s=0.0, give_up_after_s=0.0))
    stock = scheduler.kv_cache_manager.allocate_slots

    def never_for_long_calls(request: Any, *args: Any, **kwargs: Any) -> Any:
        return None if request.request_id.startswith("long") else stock(request, *args, **kwargs)

    monkeypatch.setattr(scheduler.kv_cache_manager, "allocate_slots", never_for_long_calls)
    ask(engine, "long", text(900, seed=4), 4)
    assert finish(engine)["long"].outputs[0].finish_reason == "error"
    assert len(serve(engine, "short", text(64, seed=5))[0]) == 4
    assert report(engine)["requests"]["stalls_given_up_total"] == 1


def test_a_lone_call_that_holds_its_loaded_prefix_and_cannot_start_is_recomputed(
    engine_with_an_offloaded_prefix: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.request import RequestStatus

    engine = engine_with_an_offloaded_prefix
    scheduler = core_of(engine).scheduler
    scheduler.stall = StallWatch(StallLimits(after_s=0.0, between_s=0.0))
    stock = scheduler.kv_cache_manager.allocate_slots
    refused = 0

    def never_after_a_load(request: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal refused
        if request.num_computed_tokens and request.status != RequestStatus.RUNNING:
            refused += 1
            return None
        return stock(request, *args, **kwargs)

    monkeypatch.setattr(scheduler.kv_cache_manager, "allocate_slots", never_after_a_load)
    answer, cached = serve(engine, "continued", continued())
    assert refused, "the prefix must have been loaded first"
    assert (len(answer), cached) == (4, 0)
    requests = report(engine)["requests"]
    assert (requests["stalls_total"], requests["stalls_resolved_total"]) == (1, 1)


def test_a_copy_on_the_gpu_is_left_alone_until_its_call_has_blocks() -> None:
    """vLLM 0.30 pins copies of a prefix while the call's own blocks are still to be allocated."""
    manager: Any = CountingResidentManager.__new__(CountingResidentManager)
    manager.block_size = 16
    manager.req_to_blocks = defaultdict(list)
    manager.num_cached_block = {}
    manager.residency_changes = {}
    manager._null_block = SimpleNamespace(is_null=True)
    manager.start_counting(set())
    copy = SimpleNamespace(is_null=False)
    adopted = []
    manager.coordinator = SimpleNamespace(
        commit_computed_blocks=lambda name, pages: adopted.append(
            manager.adopt_resident_page(name, 0, copy)
        )
    )
    manager.add_local_computed_blocks("call", (), 32, 0)
    assert adopted == [False]
    assert manager.host_only_pages == {"call": 2}
    assert manager.adopt_resident_page("call", 0, copy)
    assert manager.host_only_pages == {"call": 1}
