"""Snapshots to start from, a way to change them, and a small plant for closed loops."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from hisparsed.policy.decide import decide
from hisparsed.policy.memory import Memory
from hisparsed.policy.schema import Policy
from hisparsed.policy.signals import (
    AdmissionOrder,
    AdmissionRules,
    GpuPool,
    HiSparsePool,
    HotBuffers,
    Lever,
    LiveSet,
    OffloadPool,
    PoolGeometry,
    Prefix,
    Requests,
    Snapshot,
    Tokens,
    Watermark,
)

GEOMETRY = PoolGeometry(
    block_tokens=64,
    host_block_bytes=64 * 51_200,
    offload_chunk_tokens=64,
    offload_chunk_bytes=64 * 2_816,
    offload_copies=1,
    chunks_per_host_block=18,
    budget_blocks=10_000,
    max_model_len=16_384,
    topk=2_048,
    decode_query_len=1,
    gpu_blocks_total=20_000,
    hot_block_rows=64,
    hot_groups=8,
    max_lease_blocks=160,
    max_num_seqs=64,
    row_bytes=6_400,
)


def idle_snapshot(geometry: PoolGeometry = GEOMETRY, lent: int = 650) -> Snapshot:
    """A settled node at the default policy's target, empty and idle."""
    hisparse = geometry.budget_blocks - lent
    return Snapshot(
        at_s=1000.0,
        tick=0,
        policy_generation=1,
        report_age_s=0.1,
        geometry=geometry,
        hisparse=HiSparsePool(hisparse, hisparse, 0, 0, hisparse),
        offload=OffloadPool(lent * geometry.chunks_per_host_block, lent, lent, 0, 0),
        pending_blocks=0,
        draining_blocks=0,
        head_need_blocks=0,
        gpu=GpuPool(geometry.gpu_blocks_total, geometry.gpu_blocks_total // 10, False),
        requests=Requests(0, 0, 0, 0, 0, 0, 0),
        hot=HotBuffers(2.0, 0, 0, 0, 0, 0),
        sessions=LiveSet(0, 0),
        prefix=Prefix(0, 0),
        tokens=Tokens(0, 0),
        admission=AdmissionRules(AdmissionOrder.ARRIVAL, 30.0, geometry.max_num_seqs, None, 10.0),
        watermark=Watermark(geometry.gpu_blocks_total // 10, True),
    )


def change(snapshot: Snapshot, **changes: Any) -> Snapshot:
    """Replace fields; ``pool__field`` reaches into a part."""
    for path, value in changes.items():
        part, _, name = path.partition("__")
        new = dataclasses.replace(getattr(snapshot, part), **{name: value}) if name else value
        snapshot = dataclasses.replace(snapshot, **{part: new})
    return snapshot


class Plant:
    """A node that follows its targets with a lag and always has prefixes to keep.

    ``in_use_blocks`` and the other attributes may be changed between ticks.
    """

    def __init__(self, policy: Policy, lent: int, geometry: PoolGeometry = GEOMETRY) -> None:
        self.policy = policy
        self.snapshot = idle_snapshot(geometry, lent)
        self.memory = Memory()
        self.in_use_blocks = 0
        self.running = 8
        self.lag_blocks = max(1, geometry.budget_blocks // 50)
        self.tokens_a_tick = 1_000
        self.targets: list[int] = []
        self.decisions: list[Any] = []

    def run(self, ticks: int, before: Callable[[int], None] | None = None) -> None:
        for tick in range(ticks):
            if before is not None:
                before(tick)
            self._advance()
            decision, self.memory = decide(self.policy, self.snapshot, self.memory)
            self.decisions.append(decision)
            self._apply(decision.commands)
            self.targets.append(self.snapshot.offload.target_blocks)

    @property
    def moves(self) -> list[tuple[int, int]]:
        """(from, to) of every split move so far."""
        split = (decision.of(Lever.SPLIT) for decision in self.decisions)
        return [(int(one.current), int(one.wanted)) for one in split if one.acts]

    def _advance(self) -> None:
        old = self.snapshot
        geometry, target = old.geometry, old.offload.target_blocks
        lent = old.offload.lent_blocks
        takeable = max(0, geometry.budget_blocks - lent - self.in_use_blocks)
        delta = max(-self.lag_blocks, min(self.lag_blocks, takeable, target - lent))
        lent += delta
        capacity = geometry.budget_blocks - lent
        self.snapshot = dataclasses.replace(
            old,
            at_s=old.at_s + self.policy.tick,
            tick=old.tick + 1,
            hisparse=HiSparsePool(
                capacity,
                geometry.budget_blocks - target,
                self.in_use_blocks,
                capacity - self.in_use_blocks,
                0,
            ),
            offload=dataclasses.replace(
                old.offload,
                capacity_chunks=lent * geometry.chunks_per_host_block,
                lent_blocks=lent,
            ),
            pending_blocks=max(0, target - lent),
            draining_blocks=max(0, lent - target),
            requests=dataclasses.replace(old.requests, running=self.running, none=self.running),
            tokens=Tokens(old.tokens.prompt_total + self.tokens_a_tick, 0),
        )

    def _apply(self, commands: Any) -> None:
        if commands.offload_target_blocks is not None:
            target = commands.offload_target_blocks
            self.snapshot = change(self.snapshot, offload__target_blocks=target)
        if commands.multiplier is not None:
            self.snapshot = change(self.snapshot, hot__multiplier=commands.multiplier)
        if commands.admission is not None:
            self.snapshot = change(self.snapshot, admission=commands.admission)
        if commands.watermark is not None:
            default = commands.watermark == "default"
            blocks = 2_000 if default else commands.watermark
            self.snapshot = change(self.snapshot, watermark=Watermark(blocks, default))


def reasons_over(policy: Policy, snapshots: list[Snapshot], lever: Lever) -> list[Any]:
    """The decisions of one lever over a sequence of snapshots, nothing applied."""
    memory, found = Memory(), []
    for snapshot in snapshots:
        decision, memory = decide(policy, snapshot, memory)
        found.append(decision.of(lever))
    return found


def held_for(snapshot: Snapshot, seconds: int, **per_second: int) -> list[Snapshot]:
    """The same snapshot every second; ``part__counter`` grows by that much a second."""
    out = []
    for second in range(seconds + 1):
        grown = {
            path: getattr(getattr(snapshot, path.split("__")[0]), path.split("__")[1])
            + amount * second
            for path, amount in per_second.items()
        }
        out.append(change(snapshot, at_s=snapshot.at_s + second, tick=second, **grown))
    return out


class Kit:
    """Everything above for tests, which cannot import from here."""

    geometry = GEOMETRY
    idle_snapshot = staticmethod(idle_snapshot)
    change = staticmethod(change)
    reasons_over = staticmethod(reasons_over)
    held_for = staticmethod(held_for)
    Plant = Plant


@pytest.fixture(scope="session")
def kit() -> type[Kit]:
    return Kit
