"""Pages kept whole decide as vLLM's own bookkeeping does, through the same calls.

Two simulated nodes in lockstep, one of each. Calls that share prefixes, grow, are cancelled and
preempted, drafts, levers and resets at random; after each step the messages to the workers are the
same, the blocks of every request, and the order in which blocks are handed out.
"""

from __future__ import annotations

import random
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from hisparsed.config.node_description import NodeDescription, load_node_description
from hisparsed.engine.compat.replaced import pages_can_be_whole
from hisparsed.engine.pages import PagedCoordinator
from hisparsed.engine.simulated.node import SimulatedCall, SimulatedNode
from hisparsed.engine.simulated.vllm_config import SimulatedOptions
from hisparsed.policy.decisions import EngineCommand

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not pages_can_be_whole(), reason="written against another vLLM"),
]

BLOCK = 64
MIB = 1 << 20


def described() -> NodeDescription:
    """Five index groups and GPU blocks for about two whole calls."""
    tree = load_node_description("8xh200-glm-5.3").model_dump()
    tree["model"].update(layers=20, topk=64, max_model_len=8192)
    tree["gpu"]["kv_memory"] = 36 * MIB
    tree["host"]["budget"] = 160 * MIB
    tree["engine"].update(max_num_seqs=8, max_num_batched_tokens=1024)
    return NodeDescription.model_validate(tree)


def started(folder: Path, bookkeeping: str) -> SimulatedNode:
    node = described()
    options = SimulatedOptions(
        node=node,
        model_folder=folder / bookkeeping,
        host_budget_bytes=node.host.budget,
        max_lease_rows=320,
        max_model_len=4096,
        bookkeeping=bookkeeping,
    )
    simulated = SimulatedNode(options)
    simulated.put(EngineCommand(offload_target_blocks=32))
    return simulated


def plain(value: Any) -> Any:
    """``value`` without identity: what two nodes say is equal when this is."""
    if is_dataclass(value) and not isinstance(value, type):
        return type(value).__name__, [plain(getattr(value, one.name)) for one in fields(value)]
    if isinstance(value, dict):
        return [(plain(key), plain(item)) for key, item in value.items()]
    if isinstance(value, (set, frozenset)):
        return sorted(map(plain, value))
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if hasattr(value, "__dict__") and type(value).__module__.startswith("vllm"):
        return type(value).__name__, plain(vars(value))
    return value if isinstance(value, (int, float, str, bytes, type(None))) else type(value)


class Watched:
    """One node, and what its scheduler said in the last step."""

    def __init__(self, node: SimulatedNode) -> None:
        self.node = node
        self.scheduler: Any = node._scheduler
        self.said: list[Any] = []
        schedule = self.scheduler.schedule

        def scheduling(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self.said.append(_told(output))
            return output

        self.scheduler.schedule = scheduling

    def picture(self) -> dict[str, Any]:
        """All that the next step's decisions depend on."""
        manager = self.scheduler.kv_cache_manager
        coordinator = self.scheduler.hisparsed._coordinator
        rows = {
            (group, request_id): [block.block_id for block in row(request_id)]
            for group, one in enumerate(manager.coordinator.single_type_managers)
            for request_id in one.req_to_blocks
            for row in [getattr(one, "get_residency_row", one.req_to_blocks.__getitem__)]
        }
        resident = self.scheduler.hisparsed._resident
        return {
            "rows": rows,
            "gpu free": [
                one.block_id for one in manager.block_pool.free_block_queue.get_all_free_blocks()
            ],
            "gpu references": [one.ref_cnt for one in manager.block_pool.blocks],
            "host free": [
                one.block_id
                for one in coordinator.get_host_block_pool().free_block_queue.get_all_free_blocks()
            ],
            "copies": list(coordinator.copies),
            "states": {
                name: (
                    sorted(state.valid_pages),
                    state.ready_prefix_pages,
                    state.pending_pages,
                    sorted(state.pinned_clean),
                    sorted(state.unpinned_pages),
                    state.synced_pages,
                    sorted(state.stale_pages),
                )
                for name, state in coordinator.request_states.items()
            },
            "spills": list(coordinator.pending_spills),
            "hot": [sorted(one.hot_required) for one in coordinator.hot_managers],
            "residency": {
                name: {one.residency(name) for one in resident} for name in self.scheduler.requests
            },
        }


def _told(output: Any) -> Any:
    metadata = output.kv_connector_metadata
    output.kv_connector_metadata = None
    said = plain(output), [plain(one) for one in metadata.metadata]
    output.kv_connector_metadata = metadata
    return said


class Traffic:
    """Random calls and moves, the same for every node that it is given to."""

    def __init__(self, seed: int, nodes: list[Watched]) -> None:
        self.rng = random.Random(seed)
        self.nodes = nodes
        self.open: list[str] = []
        self.sessions = [[self._name() for _ in range(64)] for _ in range(6)]
        self.lengths = [self.rng.randrange(200, 2000) for _ in self.sessions]
        self.count = 0

    def _name(self) -> bytes:
        return self.rng.randbytes(16)

    def act(self) -> None:
        rng = self.rng
        dice = rng.random()
        if len(self.open) < 10 and dice < 0.5:
            self._call()
        elif dice < 0.56 and self.open:
            self._cancel(rng.choice(self.open))
        elif dice < 0.62:
            self._move()
        elif dice < 0.622:
            self._each(lambda one: one.scheduler.reset_connector_cache())
        elif dice < 0.635:
            self._preempt()

    def _call(self) -> None:
        session = self.rng.randrange(len(self.sessions))
        tokens, answer = self.lengths[session], self.rng.randrange(1, 200)
        if tokens + answer > 4000:
            self.sessions[session] = [*self.sessions[0][:4], *(self._name() for _ in range(60))]
            tokens = self.rng.randrange(200, 1500)
        self.lengths[session] = tokens + answer + self.rng.randrange(1, 600)
        self.count += 1
        name = f"call-{self.count}"
        blocks = tuple(self.sessions[session][: (tokens + answer) // BLOCK])
        self.open.append(name)
        self._each(lambda one: one.node.add(SimulatedCall(name, blocks, tokens, answer)))

    def _cancel(self, name: str) -> None:
        self.open.remove(name)
        self._each(lambda one: one.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED))

    def _move(self) -> None:
        rng = self.rng
        command = EngineCommand(
            offload_target_blocks=rng.choice((8, 24, 32, 40)),
            multiplier=rng.choice((1.0, 2.0, 3.0, 5.0)),
            watermark=rng.choice((0, 40, 10_000, "default")),
        )
        self._each(lambda one: one.node.put(command))

    def _preempt(self) -> None:
        self._each(lambda one: one.scheduler.reset_prefix_cache(reset_running_requests=True))

    def _each(self, act: Any) -> None:
        for one in self.nodes:
            act(one)

    def step(self) -> None:
        emitted = []
        for one in self.nodes:
            one.said.clear()
            found, executed = one.node.step()
            if not executed:
                now_s = one.node.clock.now_s()
                one.node.clock.advance_to(one.node.next_copy_done_s() or now_s + 0.01)
            emitted.append(found)
        assert all(found == emitted[0] for found in emitted)
        for found in emitted[0]:
            if found.finished and found.request_id in self.open:
                self.open.remove(found.request_id)


def check(folder: Path, seed: int, steps: int) -> dict[str, int]:
    """Runs both; returns what happened, so that a caller can check that something did."""
    ours, theirs = Watched(started(folder, "hisparsed")), Watched(started(folder, "vllm"))
    assert isinstance(ours.scheduler.hisparsed._coordinator, PagedCoordinator)
    assert not isinstance(theirs.scheduler.hisparsed._coordinator, PagedCoordinator)
    traffic = Traffic(seed, [ours, theirs])
    seen = {"lost": 0, "adopted": 0, "preempted": 0, "restored": 0}
    coordinator = ours.scheduler.hisparsed._coordinator
    adopt = coordinator.pages.adopt

    def adopting(*args: Any) -> None:
        seen["adopted"] += 1
        adopt(*args)

    coordinator.pages.adopt = adopting
    for step in range(steps):
        traffic.act()
        traffic.step()
        assert ours.said == theirs.said, f"step {step}"
        assert ours.picture() == theirs.picture(), f"step {step}"
        seen["restored"] += any(one.restore for one in coordinator.pending_spills.values())
        seen["lost"] += sum(coordinator.pages.host_only.values()) > 0
        seen["preempted"] += ours.scheduler.hisparsed.preemptions > seen["preempted"]
        assert ours.scheduler.hisparsed.host.watch.look_at_everything() == []
    ours.node.shutdown()
    theirs.node.shutdown()
    return seen


def test_pages_whole_and_pages_by_block_decide_alike(tmp_path: Path) -> None:
    seen = check(tmp_path, seed=0, steps=500)
    assert all(seen.values()), seen


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 5))
def test_they_decide_alike_on_other_calls(tmp_path: Path, seed: int) -> None:
    check(tmp_path, seed, steps=1000)
