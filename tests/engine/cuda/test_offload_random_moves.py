"""Stores, loads, flushes, lending and recalls at random, on ranks and copies of any speed."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from ranks import LAYOUT, Node, TenantWrite, content, write_everywhere

HOST_BLOCKS, GPU_BLOCKS = 6, 8


class RandomMoves(RuleBasedStateMachine):
    """Stores, loads, flushes, lending, recalls and HiSparse's own writes, at any speed."""

    @initialize(ranks=st.integers(1, 3), shared=st.booleans())
    def start(self, ranks: int, shared: bool) -> None:
        self.node = Node(ranks, HOST_BLOCKS, GPU_BLOCKS, shared=shared)
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
        return [block for block in range(1, GPU_BLOCKS) if block not in self.busy_gpu]

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
