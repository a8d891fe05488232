"""Several ranks, one host pool: who copies when, and that every byte is the right one.

Also stores, loads, flushes, lending and recalls at random, on ranks and copies of any speed.
"""

from __future__ import annotations

from copy import copy

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from ranks import LAYOUT, Node, TenantWrite, content, write_everywhere

HOST_BLOCKS, GPU_BLOCKS = 6, 8


def node(ranks: int = 3, *, shared: bool = True) -> Node:
    made = Node(ranks, HOST_BLOCKS, GPU_BLOCKS, shared=shared)
    made.manager.lend([1, 2])
    return made


def steps(made: Node) -> None:
    made.send_step()
    for rank in made.ranks:
        rank.take_step()


def test_one_rank_stores_and_all_ranks_load() -> None:
    made = node()
    write_everywhere(made, 3, content(1))
    made.store(1, 3)
    made.run_everything()
    assert [len(rank.store.batches) for rank in made.ranks] == [1, 0, 0]
    made.load(1, 5)
    made.run_everything()
    assert [rank.page(5) for rank in made.ranks] == [content(1)] * 3


def test_ranks_with_a_pool_each_store_a_copy_each() -> None:
    made = node(2, shared=False)
    write_everywhere(made, 3, content(1))
    made.store(1, 3)
    made.run_everything()
    assert [len(rank.store.batches) for rank in made.ranks] == [1, 1]
    made.load(1, 5)
    made.run_everything()
    assert [rank.page(5) for rank in made.ranks] == [content(1)] * 2


def test_a_chunk_cannot_be_loaded_before_the_writers_copy_has_ended() -> None:
    made = node()
    write_everywhere(made, 3, content(1))
    made.store(1, 3)
    steps(made)  # stores are handed over one step later
    made.take_output()
    steps(made)
    made.take_output()
    writer = made.ranks[0].store.stream
    assert (writer.given, writer.ran) == (1, 0)
    assert not made.loadable(1)
    writer.run_one()
    assert not made.loadable(1)
    steps(made)
    made.take_output()
    assert made.loadable(1)


def test_a_chunk_cannot_be_loaded_before_every_rank_has_reported() -> None:
    made = node(2)
    write_everywhere(made, 3, content(1))
    made.store(1, 3)
    made.send_step()
    made.send_step()
    made.send_step()
    fast, slow = made.ranks
    for _ in range(3):
        fast.take_step()
        fast.store.stream.run_up_to(fast.store.stream.given)
    assert made.take_output() == set()
    assert not made.loadable(1)
    for _ in range(3):
        slow.take_step()
    assert [made.take_output() for _ in range(3)].count({0}) == 1
    assert made.loadable(1)


def test_with_a_dead_rank_nothing_becomes_loadable_and_no_block_comes_back() -> None:
    made = node(2)
    write_everywhere(made, 3, content(1))
    made.store(1, 3)
    for _ in range(4):
        made.send_step()
        made.ranks[0].take_step()
        made.ranks[0].store.stream.run_up_to(made.ranks[0].store.stream.given)
        made.take_output()
    assert not made.loadable(1)
    assert made.manager.recall(2) == [2]
    assert made.manager.draining_blocks == 1


def test_a_chunk_that_a_slow_rank_still_loads_keeps_its_block() -> None:
    made = node(2)
    write_everywhere(made, 3, content(1))
    made.store(1, 3)
    made.run_everything()
    made.load(1, 5)
    made.send_step()
    for rank in made.ranks:
        rank.take_step()
    made.ranks[0].load.stream.run_one()
    steps(made)
    made.take_output(), made.take_output()
    assert made.manager.recall(2) == [2]
    made.ranks[1].load.stream.run_one()
    steps(made)
    made.take_output()
    assert made.manager.take_drained() == [1]
    assert made.ranks[1].page(5) == content(1)


def test_a_call_goes_on_only_when_every_rank_has_loaded() -> None:
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput

    made = node(2)
    write_everywhere(made, 3, content(1))
    made.store(1, 3)
    made.run_everything()
    made.load(1, 5)
    aggregator = KVOutputAggregator(expected_finished_count=2)

    def received() -> set[str]:
        steps(made)
        outputs = []
        for rank in made.ranks:
            _, finished = rank.outbox.popleft()
            outputs.append(copy(EMPTY_MODEL_RUNNER_OUTPUT))
            outputs[-1].kv_connector_output = KVConnectorOutput(finished_recving=finished)
        return set(aggregator.aggregate(outputs).kv_connector_output.finished_recving or ())

    assert received() == set()
    made.ranks[0].load.stream.run_one()
    assert received() == set()
    made.ranks[1].load.stream.run_one()
    assert received() == {"request"}


def test_a_flush_waits_for_the_copy_before_the_gpu_block_is_written_again() -> None:
    made = node(2)
    write_everywhere(made, 3, content(1))
    job = made.store(1, 3)
    assert job is not None
    steps(made)
    made.take_output()
    made.flush(job, 3, content(2))
    steps(made)
    made.take_output()
    assert made.loadable(1)
    made.load(1, 5)
    made.run_everything()
    assert made.ranks[1].page(5) == content(1)
    assert made.ranks[1].page(3) == content(2)


@pytest.mark.parametrize("late", [False, True])
def test_rows_that_hisparse_still_mirrors_into_a_lent_block_land_before_the_chunk(
    late: bool,
) -> None:
    made = node(2)
    # A step that is under way mirrors into block 3; its request ends and the block is lent.
    made.tenant_writes(TenantWrite(3, content(9, LAYOUT.block_bytes), late))
    steps(made)
    made.take_output()
    made.manager.recall(2)
    made.manager.lend([3])
    write_everywhere(made, 4, content(1))
    job = made.store(1, 4)
    assert job is not None
    # Stored and flushed in one step: vLLM hands it over before HiSparse's own step begins.
    made.flush(job, 4, content(2))
    made.run_everything()
    made.load(1, 5)
    made.run_everything()
    assert made.ranks[1].page(5) == content(1)


def test_a_load_that_a_step_waits_for_passes_those_before_it() -> None:
    made = node(1)
    (rank,) = made.ranks
    for key, block in ((1, 3), (2, 4)):
        write_everywhere(made, block, content(key))
        made.store(key, block)
    made.run_everything()
    slow = made.manager.prepare_load([made.key(1)], made.context)
    quick = made.manager.prepare_load([made.key(2)], made.context)
    rank.worker.submit_load(70, slow, made._gpu(5))
    rank.worker.submit_load(71, quick, made._gpu(6), expedited=True)
    rank.worker.wait({71})
    assert rank.page(6) == content(2)
    assert [result.job_id for result in rank.worker.get_finished()] == [71]
    rank.worker.wait({70})
    assert [result.job_id for result in rank.worker.get_finished()] == [70]


def test_bytes_are_counted_by_the_rank_that_copied_them() -> None:
    made = node(2)
    write_everywhere(made, 3, content(1))
    output = made.manager.prepare_store([made.key(1)], made.context)
    for rank in made.ranks:
        rank.worker.submit_store(5, made._gpu(3), output.store_spec)  # type: ignore[union-attr]
        rank.worker.wait({5})
    sizes = [rank.worker.get_finished()[0].transfer_size for rank in made.ranks]
    assert sizes == [LAYOUT.chunk_bytes, None]


def test_bytes_that_every_rank_loads_are_counted_once() -> None:
    made = node(2)
    write_everywhere(made, 3, content(1))
    made.store(1, 3)
    made.run_everything()
    source = made.manager.prepare_load([made.key(1)], made.context)
    for rank in made.ranks:
        rank.worker.submit_load(6, source, made._gpu(5))
        rank.worker.wait({6})
    sizes = [rank.worker.get_finished()[0].transfer_size for rank in made.ranks]
    assert sizes == [LAYOUT.chunk_bytes, None]
    assert made.ranks[1].page(5) == content(1)


def test_a_job_for_a_chunk_outside_the_pool_ends_the_worker_and_copies_nothing() -> None:
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

    made = node(2)
    outside = CPULoadStoreSpec([HOST_BLOCKS * LAYOUT.chunks_per_block])
    for rank in made.ranks:
        with pytest.raises(ValueError, match=r"offload job 8: chunk 24 does not exist"):
            rank.worker.submit_store(8, made._gpu(3), outside)
        with pytest.raises(ValueError, match=r"offload job 9: chunk 24 does not exist"):
            rank.worker.submit_load(9, outside, made._gpu(3))
        assert all(stream.given == 0 for stream in rank.streams)


def test_shutdown_lets_copies_end_and_takes_no_more() -> None:
    made = node(1)
    (rank,) = made.ranks
    write_everywhere(made, 3, content(1))
    output = made.manager.prepare_store([made.key(1)], made.context)
    assert output is not None
    rank.worker.submit_store(5, made._gpu(3), output.store_spec)
    rank.worker.shutdown()
    assert rank.store.stream.ran == 1
    assert rank.worker.get_finished() == []
    with pytest.raises(RuntimeError, match="offload job 6: this worker has been shut down"):
        rank.worker.submit_store(6, made._gpu(3), output.store_spec)


MOVED_HOST_BLOCKS, MOVED_GPU_BLOCKS = 6, 8


class RandomMoves(RuleBasedStateMachine):
    """Stores, loads, flushes, lending, recalls and HiSparse's own writes, at any speed."""

    @initialize(ranks=st.integers(1, 3), shared=st.booleans())
    def start(self, ranks: int, shared: bool) -> None:
        self.node = Node(ranks, MOVED_HOST_BLOCKS, MOVED_GPU_BLOCKS, shared=shared)
        self.node.manager.lend([1, 2])
        self.pages: dict[int, bytes] = {}  # key -> content
        self.stores: dict[int, tuple[int, int]] = {}  # job -> key, GPU block
        self.loads: dict[int, tuple[int, int]] = {}
        self.hisparse: dict[int, bytes | None] = dict.fromkeys([3, 4, 5])
        self.seed = 0

    # --- moves ------------------------------------------------------------------------

    @property
    def busy_gpu(self) -> set[int]:
        return {block for _, block in (*self.stores.values(), *self.loads.values())}

    @property
    def idle_gpu(self) -> list[int]:
        return [block for block in range(1, MOVED_GPU_BLOCKS) if block not in self.busy_gpu]

    @precondition(lambda self: self.idle_gpu)
    @rule(key=st.integers(0, 9), pick=st.integers(0, 99), flush=st.booleans())
    def store(self, key: int, pick: int, flush: bool) -> None:
        if self.node.manager.has_chunk(self.node.key(key)):
            return
        block = self.idle_gpu[pick % len(self.idle_gpu)]
        # The steps that are under way do not touch an idle block, so it can be filled at once.
        self.seed += 1
        page = content(self.seed)
        job = self.node.store(key, block)
        if job is None:
            return
        write_everywhere(self.node, block, page)
        self.pages[key] = page
        self.stores[job] = (key, block)
        if flush:
            self.node.flush(job, block, content(-self.seed))

    @property
    def loadable(self) -> list[int]:
        return [key for key in sorted(self.pages) if self.node.loadable(key)]

    @precondition(lambda self: self.idle_gpu and self.loadable)
    @rule(which=st.integers(0, 99), pick=st.integers(0, 99))
    def load(self, which: int, pick: int) -> None:
        key = self.loadable[which % len(self.loadable)]
        block = self.idle_gpu[pick % len(self.idle_gpu)]
        self.loads[self.node.load(key, block)] = (key, block)

    @rule(late=st.booleans(), pick=st.integers(0, 99))
    def hisparse_writes(self, late: bool, pick: int) -> None:
        if self.hisparse:
            block = sorted(self.hisparse)[pick % len(self.hisparse)]
            self.seed += 1
            page = self.hisparse[block] = content(self.seed, LAYOUT.block_bytes)
            self.node.tenant_writes(TenantWrite(block, page, late))

    @rule(pick=st.integers(0, 99))
    def lend(self, pick: int) -> None:
        # What is written by a step that is not sent yet belongs to a request that still runs.
        unsent = {write.block for write in self.node._tenant}
        idle = sorted(set(self.hisparse) - unsent)
        if idle:
            block = idle[pick % len(idle)]
            del self.hisparse[block]
            self.node.manager.lend([block])

    @rule(count=st.integers(1, 3))
    def recall(self, count: int) -> None:
        self.give_to_hisparse(self.node.manager.recall(count))

    def give_to_hisparse(self, blocks: list[int]) -> None:
        self.hisparse.update(dict.fromkeys(blocks))

    # --- time -------------------------------------------------------------------------

    @precondition(lambda self: self.node.steps_out < 2)
    @rule()
    def send_step(self) -> None:
        self.node.send_step()

    @rule()
    def every_rank_takes_a_step(self) -> None:
        if self.node.steps_out < 2:
            self.node.send_step()
        for rank in self.node.ranks:
            if rank.inbox:
                rank.take_step()
        self.take_output()

    @rule()
    def all_copies_run(self) -> None:
        for rank in self.node.ranks:
            for stream in rank.streams:
                stream.run_up_to(stream.given)

    @rule(pick=st.integers(0, 99))
    def a_rank_takes_a_step(self, pick: int) -> None:
        rank = self.node.ranks[pick % len(self.node.ranks)]
        if rank.inbox:
            rank.take_step()

    @rule(pick=st.integers(0, 99))
    def a_copy_runs(self, pick: int) -> None:
        streams = [stream for rank in self.node.ranks for stream in rank.streams if stream.queued]
        if streams:
            streams[pick % len(streams)].run_one()

    @rule()
    def take_output(self) -> None:
        self.check(self.node.take_output())
        self.give_to_hisparse(self.node.manager.take_drained())

    def check(self, ended: set[int]) -> None:
        for job in ended:
            if job in self.loads:
                key, block = self.loads.pop(job)
                assert [rank.page(block) for rank in self.node.ranks] == (
                    [self.pages[key]] * len(self.node.ranks)
                )
            else:
                del self.stores[job]

    # --- what must hold ---------------------------------------------------------------

    @invariant()
    def no_block_has_two_tenants(self) -> None:
        assert not any(self.node.manager.holds(block) for block in self.hisparse)

    def teardown(self) -> None:
        if not hasattr(self, "node"):
            return
        self.check(self.node.run_everything())
        assert not self.stores
        assert not self.loads
        writers = [rank for rank in self.node.ranks if rank.writes]
        for block, written in self.hisparse.items():
            if written is not None:
                assert all(rank.host_block(block) == written for rank in writers)
        for key, page in self.pages.items():
            if self.node.loadable(key):
                self.node.load(key, 1)
                self.node.run_everything()
                assert all(rank.page(1) == page for rank in self.node.ranks)


TestRandomMoves = RandomMoves.TestCase
TestRandomMoves.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
