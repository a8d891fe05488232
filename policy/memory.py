"""What the policy carries from tick to tick: windows of signals and past moves, frozen.

``decide`` takes one and returns the next; a fresh ``Memory()`` is the start of a node's
life. Nothing outside this and the snapshot influences a decision.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from hisparsed.policy.reach import live_load, reach_now
from hisparsed.policy.schema import Policy
from hisparsed.policy.signals import Snapshot
from hisparsed.policy.windows import Window


class Direction(StrEnum):
    """Towards safety is the direction that cannot lose prefixes or starve requests."""

    SAFETY = "towards safety"
    THRIFT = "towards thrift"


@dataclass(frozen=True, slots=True)
class MoveHistory:
    """Past moves of one lever; ``None`` before the first."""

    last_at_s: float | None = None
    last_direction: Direction | None = None
    last_safety_at_s: float | None = None
    undone: int = 0
    """Thrift moves that a move towards safety took back."""
    undone_at_s: float = 0.0

    def moved(self, at_s: float, direction: Direction) -> MoveHistory:
        """The history with one more move."""
        safety = direction is Direction.SAFETY
        takes_back = safety and self.last_direction is Direction.THRIFT
        return MoveHistory(
            last_at_s=at_s,
            last_direction=direction,
            last_safety_at_s=at_s if safety else self.last_safety_at_s,
            undone=self.undone + takes_back,
            undone_at_s=at_s if takes_back else self.undone_at_s,
        )

    def forgetting(self, at_s: float, forget_s: float) -> MoveHistory:
        """The history without what was undone more than ``forget_s`` ago."""
        if self.undone and at_s - self.undone_at_s > forget_s:
            return replace(self, undone=0)
        return self

    def since_last_s(self, at_s: float) -> float:
        return float("inf") if self.last_at_s is None else at_s - self.last_at_s

    def since_safety_s(self, at_s: float) -> float:
        return float("inf") if self.last_safety_at_s is None else at_s - self.last_safety_at_s


@dataclass(frozen=True, slots=True)
class Signals:
    """Windows; ``split`` ones span rebalance.window, ``shrink``, ``grow`` and ``release``
    the window of that name."""

    split_in_use_blocks: Window = field(default_factory=Window)
    split_in_flight_chunks: Window = field(default_factory=Window)
    split_tokens_total: Window = field(default_factory=Window)
    shrink_pressure: Window = field(default_factory=Window)
    shrink_loads_total: Window = field(default_factory=Window)
    shrink_references_total: Window = field(default_factory=Window)
    shrink_h2d_bytes_total: Window = field(default_factory=Window)
    grow_free_share: Window = field(default_factory=Window)
    grow_waiting: Window = field(default_factory=Window)
    grow_loads_total: Window = field(default_factory=Window)
    release_load: Window = field(default_factory=Window)


@dataclass(frozen=True, slots=True)
class Memory:
    last_at_s: float | None = None
    last_tokens_total: int = 0
    signals: Signals = field(default_factory=Signals)
    split: MoveHistory = field(default_factory=MoveHistory)
    multiplier: MoveHistory = field(default_factory=MoveHistory)


def free_share(snapshot: Snapshot) -> float:
    return snapshot.gpu.free_blocks / max(1, snapshot.gpu.total_blocks)


def under_gpu_pressure(policy: Policy, snapshot: Snapshot) -> bool:
    """Requests wait for GPU blocks, or too few are free."""
    return snapshot.gpu.waiting_for_blocks or free_share(snapshot) < policy.hot.free_low


def observe(policy: Policy, snapshot: Snapshot, memory: Memory) -> Memory:
    """Memory with this snapshot's signals; an engine that began anew clears it."""
    at_s = snapshot.at_s
    tokens = snapshot.tokens.prompt_total + snapshot.tokens.generated_total
    clock_went_back = memory.last_at_s is not None and at_s < memory.last_at_s
    if clock_went_back or tokens < memory.last_tokens_total:
        memory = Memory()
    old, hot = memory.signals, snapshot.hot
    gap_s = policy.stale_after
    split_s, release_s = policy.rebalance.window, max(policy.admission.release_after, policy.tick)
    shrink_s, grow_s = policy.hot.window_shrink, policy.hot.window_grow
    host_references = hot.references_total - hot.resident_total

    def push(window: Window, value: float, span_s: float) -> Window:
        return window.push(at_s, value, span_s, gap_s)

    signals = Signals(
        push(old.split_in_use_blocks, snapshot.hisparse.in_use_blocks, split_s),
        push(old.split_in_flight_chunks, snapshot.offload.in_use_chunks, split_s),
        push(old.split_tokens_total, tokens, split_s),
        push(old.shrink_pressure, under_gpu_pressure(policy, snapshot), shrink_s),
        push(old.shrink_loads_total, hot.loads_total, shrink_s),
        push(old.shrink_references_total, host_references, shrink_s),
        push(old.shrink_h2d_bytes_total, hot.h2d_bytes_total, shrink_s),
        push(old.grow_free_share, free_share(snapshot), grow_s),
        push(old.grow_waiting, snapshot.requests.waiting, grow_s),
        push(old.grow_loads_total, hot.loads_total, grow_s),
        push(old.release_load, live_load(snapshot, reach_now(snapshot)), release_s),
    )
    forget_s = policy.rebalance.back_off.forget
    return Memory(
        last_at_s=at_s,
        last_tokens_total=tokens,
        signals=signals,
        split=memory.split.forgetting(at_s, forget_s),
        multiplier=memory.multiplier.forgetting(at_s, forget_s),
    )
