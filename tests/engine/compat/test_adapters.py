"""Each difference between versions of vLLM is detected from the objects themselves, both ways."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

from hisparsed.engine.compat.adapters import (
    ActiveLimit,
    admission_cap,
    detached_blocks,
    forget_failed_blocks,
    holders,
    remove_holder,
    waiting_queues,
)
from hisparsed.engine.compat.residency import ResidencyReader, watch_lost_pages


class Queue(deque[Any]):
    def remove_requests(self, requests: list[Any]) -> None:
        for request in requests:
            self.remove(request)


def call(name: str) -> SimpleNamespace:
    return SimpleNamespace(request_id=name)


class TestCallsThatHoldBlocksWhileTheyWait:
    def test_have_their_own_queue_since_0_31(self) -> None:
        first, second = call("first"), call("second")
        scheduler = SimpleNamespace(waiting=Queue(), kv_holding_waiting=Queue([first, second]))

        assert holders(scheduler) == [first, second]
        remove_holder(scheduler, second)
        assert waiting_queues(scheduler) == (Queue(), Queue([first]))

    def test_are_those_with_blocks_among_all_skipped_calls_before(self) -> None:
        loaded, bare = call("loaded"), call("bare")
        blocks = {"loaded": ([1, 2], []), "bare": ([], [])}
        scheduler = SimpleNamespace(
            waiting=Queue(),
            skipped_waiting=Queue([bare, loaded]),
            kv_cache_manager=SimpleNamespace(get_block_ids=blocks.__getitem__),
        )

        assert holders(scheduler) == [loaded]
        remove_holder(scheduler, loaded)
        assert waiting_queues(scheduler) == (Queue(), Queue([bare]))


class TestTheLimitOfRunningCalls:
    def test_is_vllms_own_since_0_31(self) -> None:
        scheduler = SimpleNamespace(max_num_active_reqs=8, max_num_running_reqs=9, running=[1] * 8)
        limit = ActiveLimit(scheduler)

        limit.set(3)
        limit.before_pass()

        assert (limit.configured, limit.most) == (8, 3)
        assert (scheduler.max_num_active_reqs, scheduler.max_num_running_reqs) == (3, 9)

    def test_comes_in_force_as_calls_end_before(self) -> None:
        scheduler = SimpleNamespace(max_num_running_reqs=8, running=[1] * 6)
        limit = ActiveLimit(scheduler)
        seen = []

        limit.set(3)
        for running in (6, 4, 2):
            scheduler.running = [1] * running
            limit.before_pass()
            seen.append(scheduler.max_num_running_reqs)

        assert seen == [6, 4, 3]
        assert (limit.configured, limit.most) == (8, 3)


def test_the_admission_cap_is_found_under_both_names() -> None:
    assert admission_cap(SimpleNamespace(max_admission_blocks_per_request=7)) == 7
    assert admission_cap(SimpleNamespace(_max_admission_blocks_per_request=6)) == 6


def test_detached_blocks_are_none_where_vllm_keeps_none() -> None:
    assert detached_blocks(None) == []
    assert detached_blocks(SimpleNamespace()) == []
    assert detached_blocks(SimpleNamespace(detached_blocks=None)) == []
    assert detached_blocks(SimpleNamespace(detached_blocks=[1, 2])) == [1, 2]


class Manager:
    def __init__(self, *resident: int) -> None:
        self.resident = set(resident)

    def get_resident_page(self, request_id: str, page: int) -> str | None:
        return "block" if page in self.resident else None


class Coordinator:
    """Loses pages itself, as before 0.32."""

    def __init__(self, *managers: Manager) -> None:
        self.resident_managers = managers
        self.block_table_updates: set[str] = set()

    def _lose_page(self, request_id: str, page: int) -> None:
        for manager in self.resident_managers:
            manager.resident.discard(page)


class TestResidency:
    def test_pages_that_the_coordinator_loses_are_counted_where_they_were(self) -> None:
        full, half = Manager(0, 1), Manager(1)
        coordinator, lost = Coordinator(full, half), []
        watch_lost_pages(
            coordinator, lambda manager, request_id: lost.append((manager, request_id))
        )

        coordinator._lose_page("a", 0)
        coordinator._lose_page("a", 0)
        coordinator._lose_page("b", 1)

        assert lost == [(full, "a"), (full, "b"), (half, "b")]

    def test_managers_that_are_asked_themselves_are_not_watched(self) -> None:
        coordinator = Coordinator(Manager(0))
        del coordinator.block_table_updates
        before = coordinator._lose_page

        watch_lost_pages(coordinator, lambda manager, request_id: None)

        assert coordinator._lose_page == before

    def test_comes_with_the_connector_since_0_32(self) -> None:
        update = SimpleNamespace(pages=[3], block_ids=([0], [9]))
        hisparse = SimpleNamespace(residency_updates={"a": update})

        assert list(ResidencyReader(2, 2).updates(None, hisparse)) == [("a", [3], ([0], [9]))]

    def test_is_read_from_block_tables_before(self) -> None:
        reader = ResidencyReader(1, 2)
        first = step(new={"a": ([90], [1, 2], [3, 4])})
        second = step(cached={"a": ([91], [5], [6])})
        third = step(cached={"a": ([92], [7], [8])}, whole={"a": ([90], [1, 0, 5], [3, 0, 6])})
        fourth = step(finished={"a"}, whole={"a": ([90], [1], [3])})

        seen = [list(reader.updates(one, SimpleNamespace())) for one in (first, second)]
        assert seen == [[("a", [0, 1], ([1, 2], [3, 4]))], [("a", [2], ([5], [6]))]]
        assert list(reader.updates(third, SimpleNamespace())) == [
            ("a", [0, 1, 2], ([1, 0, 5], [3, 0, 6]))
        ]
        assert list(reader.updates(fourth, SimpleNamespace())) == []


def step(
    *,
    new: dict[str, Any] | None = None,
    cached: dict[str, Any] | None = None,
    whole: dict[str, Any] | None = None,
    finished: set[str] | None = None,
) -> SimpleNamespace:
    cached = cached or {}
    return SimpleNamespace(
        finished_req_ids=finished or set(),
        preempted_req_ids=None,
        block_table_updates=whole,
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, block_ids=blocks) for name, blocks in (new or {}).items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached), new_block_ids=list(cached.values())
        ),
    )


def test_a_fetch_that_fails_on_one_rank_first_is_known_by_its_call() -> None:
    """vLLM passes on the blocks that the first rank names, and the call with the last rank."""
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

    failed = KVConnectorOutput(
        finished_recving={"call"}, failed_recving={"call"}, invalid_block_ids={1, 2}
    )
    together = KVOutputAggregator(expected_finished_count=2)

    def step(*ranks: KVConnectorOutput) -> ModelRunnerOutput:
        whole = together.aggregate(
            [
                ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=rank)
                for rank in ranks
            ]
        )
        assert whole is not None
        return whole

    first = step(failed, KVConnectorOutput())
    assert first.kv_connector_output is not None
    assert not first.kv_connector_output.failed_recving
    forget_failed_blocks(first, calls_follow=False)
    assert first.kv_connector_output.invalid_block_ids == {1, 2}, "no call follows: it is an error"
    forget_failed_blocks(first, calls_follow=True)
    assert not first.kv_connector_output.invalid_block_ids
    last = step(KVConnectorOutput(), failed).kv_connector_output
    assert last is not None
    assert last.failed_recving == {"call"}
