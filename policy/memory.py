"""What the policy carries from tick to tick: windows of signals and past moves, frozen.

``decide`` takes a ``Memory`` and returns the next; a fresh ``Memory()`` is the state at a node's
start. A decision depends only on this, the policy and the snapshot. ``Window`` and ``Ewma`` hold
lowest, highest, rate and smoothed value of a signal in bounded memory: samples fall into buckets,
so an hour costs as much as a minute, and a window covers the asked span and at most one bucket
more. Time is data: nothing here reads a clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from hisparsed.policy.bounds import step_blocks
from hisparsed.policy.forecasts import Figures, Outcome, Setting
from hisparsed.policy.reach import live_load, reach_now, served_with
from hisparsed.policy.schema import Policy
from hisparsed.policy.signals import GhostPoint, Lever, Snapshot

_BUCKETS = 48


@dataclass(frozen=True, slots=True)
class Bucket:
    start_s: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Window:
    """Immutable; ``push`` returns the next one."""

    buckets: tuple[Bucket, ...] = ()
    since_s: float = 0.0
    """When uninterrupted observation began."""
    last_s: float = 0.0

    def push(self, at_s: float, value: float, span_s: float, max_gap_s: float) -> Window:
        """The window with one more sample; after a gap over ``max_gap_s`` it starts again."""
        if not self.buckets or at_s - self.last_s > max_gap_s:
            return Window((Bucket(at_s, value, value),), at_s, at_s)
        buckets, newest = self.buckets, self.buckets[-1]
        if at_s - newest.start_s < span_s / _BUCKETS:
            merged = Bucket(newest.start_s, min(newest.low, value), max(newest.high, value))
            buckets = (*buckets[:-1], merged)
        else:
            buckets = (*buckets, Bucket(at_s, value, value))
        drop = 0
        while drop + 1 < len(buckets) and buckets[drop + 1].start_s <= at_s - span_s:
            drop += 1
        return Window(buckets[drop:], self.since_s, at_s)

    def full(self, span_s: float) -> bool:
        """Whether ``span_s`` was observed without a gap."""
        return bool(self.buckets) and self.last_s - self.since_s >= span_s

    @property
    def low(self) -> float:
        """Lowest value; of an empty window, 0."""
        return min((bucket.low for bucket in self.buckets), default=0.0)

    @property
    def high(self) -> float:
        """Highest value; of an empty window, 0."""
        return max((bucket.high for bucket in self.buckets), default=0.0)

    @property
    def observed_s(self) -> float:
        """Time between the oldest and the newest sample held."""
        return self.last_s - self.buckets[0].start_s if self.buckets else 0.0

    @property
    def rise(self) -> float:
        """By how much a counter rose in the window."""
        return self.high - self.low

    @property
    def rate_per_s(self) -> float | None:
        """How fast a counter rose; ``None`` before two samples at different times."""
        return self.rise / self.observed_s if self.observed_s > 0 else None


@dataclass(frozen=True, slots=True)
class Ewma:
    """A smoothed signal whose older samples fade with a time constant; immutable."""

    value: float | None = None
    """``None`` before the first sample."""
    last_s: float = 0.0

    def push(self, at_s: float, value: float, time_constant_s: float, max_gap_s: float) -> Ewma:
        """With one more sample; a gap over ``max_gap_s`` starts again."""
        elapsed_s = at_s - self.last_s
        if self.value is None or elapsed_s > max_gap_s:
            return Ewma(float(value), at_s)
        kept = math.exp(-elapsed_s / time_constant_s)
        return Ewma(value + (self.value - value) * kept, at_s)


QUEUE_SPAN_S = 300.0
"""Calls of agents take minutes, so a queue's pace shows over minutes only."""
_QUEUE_SMOOTHING_S = 60.0
SAMPLED_SPAN_S = 600.0
"""vLLM samples its counters once in minutes."""


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
    """Moves that were undone or missed their expectation."""
    undone_at_s: float = 0.0

    def moved(self, at_s: float, direction: Direction, *, probing: bool = False) -> MoveHistory:
        """The history with one more move.

        A move towards safety undoes the savings before it. A ``probing`` move, made on measured
        gains, undoes moves in the other direction, and gives nothing for safety.
        """
        safety = direction is Direction.SAFETY
        turned = self.last_direction is not None and direction is not self.last_direction
        takes_back = turned and (safety or probing)
        return MoveHistory(
            last_at_s=at_s,
            last_direction=direction,
            last_safety_at_s=at_s if safety and not probing else self.last_safety_at_s,
            undone=self.undone + takes_back,
            undone_at_s=at_s if takes_back else self.undone_at_s,
        )

    def disappointed(self, at_s: float) -> MoveHistory:
        """The history after a move that missed its expectation."""
        return replace(self, undone=self.undone + 1, undone_at_s=at_s)

    def forgetting(self, at_s: float, forget_s: float) -> MoveHistory:
        """The history without moves undone more than ``forget_s`` ago."""
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
    the window of that name, ``queue`` ones ``QUEUE_SPAN_S``, ``sampled`` ``SAMPLED_SPAN_S``."""

    split_in_use_blocks: Window = field(default_factory=Window)
    split_in_flight_chunks: Window = field(default_factory=Window)
    split_tokens_total: Window = field(default_factory=Window)
    split_hit_total: Window = field(default_factory=Window)
    split_query_total: Window = field(default_factory=Window)
    split_hisparse_ghost_total: Window = field(default_factory=Window)
    """Tokens that the HiSparse pool would have served with one step more."""
    split_hisparse_deep_total: Window = field(default_factory=Window)
    """The same with as much more as a step takes from the offload pool's reach."""
    split_hisparse_half_total: Window = field(default_factory=Window)
    """The same with half of that."""
    split_offload_ghost_total: Window = field(default_factory=Window)
    shrink_pressure: Window = field(default_factory=Window)
    shrink_loads_total: Window = field(default_factory=Window)
    shrink_references_total: Window = field(default_factory=Window)
    shrink_h2d_bytes_total: Window = field(default_factory=Window)
    shrink_steps_total: Window = field(default_factory=Window)
    shrink_scheduled_total: Window = field(default_factory=Window)
    grow_free_share: Window = field(default_factory=Window)
    grow_waiting: Window = field(default_factory=Window)
    grow_loads_total: Window = field(default_factory=Window)
    grow_h2d_bytes_total: Window = field(default_factory=Window)
    grow_decode_seconds: Window = field(default_factory=Window)
    sampled_bytes_total: Window = field(default_factory=Window)
    """Of vLLM's own sampled counters; empty where there are none."""
    release_load: Window = field(default_factory=Window)
    queue_finished_total: Window = field(default_factory=Window)
    queue_waiting: Ewma = field(default_factory=Ewma)
    no_progress_since_s: float | None = None
    """Since when the engine has computed nothing; ``None`` if that is unknown."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """The expected gain of a lever's last move, and the verdict on it."""

    at_s: float
    current: Setting
    wanted: Setting
    expected: Figures
    hit_ratio: float | None = None
    """Of the window before the move, as the next two."""
    query_per_min: float | None = None
    asked_per_s: float | None = None
    """References to rows that were not on the GPU."""
    leased_requests: int = 0
    fitting: float = 1.0
    """Share of the idle live set that the smaller reach holds."""
    outcome: Outcome | None = None
    """``None`` until the move has settled and a window has passed since."""
    judged_at_s: float | None = None


@dataclass(frozen=True, slots=True)
class JudgedError:
    """The error of a move's worst figure, as a share of the expected value."""

    at_s: float
    error: float


@dataclass(frozen=True, slots=True)
class Memory:
    last_at_s: float | None = None
    last_totals: tuple[int, ...] = ()
    signals: Signals = field(default_factory=Signals)
    split: MoveHistory = field(default_factory=MoveHistory)
    multiplier: MoveHistory = field(default_factory=MoveHistory)
    sharing: MoveHistory = field(default_factory=MoveHistory)
    admission: MoveHistory = field(default_factory=MoveHistory)
    expectations: Mapping[Lever, Expectation] = field(default_factory=dict)
    errors: Mapping[Lever, tuple[JudgedError, ...]] = field(default_factory=dict)
    """Of the moves that were judged last, oldest first."""
    effective: Ewma = field(default_factory=Ewma)
    """Share of the split's moves that reached their expectation, recent ones weighing more."""


def free_share(snapshot: Snapshot) -> float:
    return snapshot.gpu.free_blocks / max(1, snapshot.gpu.total_blocks)


def under_gpu_pressure(policy: Policy, snapshot: Snapshot) -> bool:
    """Requests wait, preempted ones among them, and GPU blocks are short."""
    gpu = snapshot.gpu
    short = gpu.waiting_for_blocks or free_share(snapshot) < policy.hot.free_low
    return short and snapshot.requests.waiting > 0


def remember(policy: Policy, snapshot: Snapshot, memory: Memory) -> Memory:
    """Memory with this snapshot's signals.

    A counter that decreased means a new engine: observations of the old one are dropped. If the
    clock went back, past moves are dropped as well.
    """
    at_s, totals = snapshot.at_s, _totals(snapshot)
    if memory.last_at_s is not None and at_s < memory.last_at_s:
        memory = Memory()
    elif _went_back(memory.last_totals, totals):
        memory = replace(memory, signals=Signals(), expectations={})
    forget_s = policy.rebalance.back_off.forget
    return replace(
        memory,
        last_at_s=at_s,
        last_totals=totals,
        signals=_signals(policy, snapshot, memory),
        split=memory.split.forgetting(at_s, forget_s),
        multiplier=memory.multiplier.forgetting(at_s, forget_s),
        sharing=memory.sharing.forgetting(at_s, forget_s),
        admission=memory.admission.forgetting(at_s, forget_s),
        errors={
            lever: tuple(one for one in errors if at_s - one.at_s <= forget_s)
            for lever, errors in memory.errors.items()
        },
    )


def _signals(policy: Policy, snapshot: Snapshot, memory: Memory) -> Signals:
    at_s, old, hot = snapshot.at_s, memory.signals, snapshot.hot
    gap_s = policy.stale_after
    split_s, release_s = policy.rebalance.window, max(policy.admission.release_after, policy.tick)
    shrink_s, grow_s = policy.hot.window_shrink, policy.hot.window_grow
    progress, prefix = snapshot.progress, snapshot.prefix
    one_step = step_blocks(snapshot.geometry, policy.rebalance.step)
    deep = one_step * (1 + snapshot.geometry.chunks_per_host_block)

    def push(window: Window, value: float, span_s: float) -> Window:
        return window.push(at_s, value, span_s, gap_s)

    def push_ghost(window: Window, points: tuple[GhostPoint, ...], extra_blocks: int) -> Window:
        total = served_with(points, extra_blocks)
        # Another step reads another point of the curve: not the counter of before.
        if total is None or total < window.high:
            window = Window()
        return window if total is None else push(window, total, split_s)

    tokens = snapshot.tokens.prompt_total + snapshot.tokens.generated_total
    return Signals(
        split_in_use_blocks=push(old.split_in_use_blocks, snapshot.hisparse.in_use_blocks, split_s),
        split_in_flight_chunks=push(
            old.split_in_flight_chunks, snapshot.offload.in_use_chunks, split_s
        ),
        split_tokens_total=push(old.split_tokens_total, tokens, split_s),
        split_hit_total=push(old.split_hit_total, prefix.hit_tokens_total, split_s),
        split_query_total=push(old.split_query_total, prefix.query_tokens_total, split_s),
        split_hisparse_ghost_total=push_ghost(
            old.split_hisparse_ghost_total, snapshot.hisparse.ghost, one_step
        ),
        split_hisparse_deep_total=push_ghost(
            old.split_hisparse_deep_total, snapshot.hisparse.ghost, deep
        ),
        split_hisparse_half_total=push_ghost(
            old.split_hisparse_half_total, snapshot.hisparse.ghost, deep // 2
        ),
        split_offload_ghost_total=push_ghost(
            old.split_offload_ghost_total, snapshot.offload.ghost, one_step
        ),
        shrink_pressure=push(old.shrink_pressure, under_gpu_pressure(policy, snapshot), shrink_s),
        shrink_loads_total=push(old.shrink_loads_total, hot.loads_total, shrink_s),
        shrink_references_total=push(
            old.shrink_references_total, hot.references_total - hot.resident_total, shrink_s
        ),
        shrink_h2d_bytes_total=push(old.shrink_h2d_bytes_total, hot.h2d_bytes_total, shrink_s),
        shrink_steps_total=Window()
        if progress is None
        else push(old.shrink_steps_total, progress.steps_total, shrink_s),
        shrink_scheduled_total=Window()
        if progress is None
        else push(old.shrink_scheduled_total, progress.scheduled_tokens_total, shrink_s),
        grow_free_share=push(old.grow_free_share, free_share(snapshot), grow_s),
        grow_waiting=push(old.grow_waiting, snapshot.requests.waiting, grow_s),
        grow_loads_total=push(old.grow_loads_total, hot.loads_total, grow_s),
        grow_h2d_bytes_total=push(old.grow_h2d_bytes_total, hot.h2d_bytes_total, grow_s),
        grow_decode_seconds=Window()
        if progress is None or progress.decode_seconds_total is None
        else push(old.grow_decode_seconds, progress.decode_seconds_total, grow_s),
        sampled_bytes_total=Window()
        if snapshot.sampled_rows is None
        else push(old.sampled_bytes_total, snapshot.sampled_rows.h2d_bytes_total, SAMPLED_SPAN_S),
        release_load=push(old.release_load, live_load(snapshot, reach_now(snapshot)), release_s),
        queue_finished_total=push(
            old.queue_finished_total, snapshot.requests.finished_total, QUEUE_SPAN_S
        ),
        queue_waiting=old.queue_waiting.push(
            at_s, snapshot.requests.waiting, _QUEUE_SMOOTHING_S, gap_s
        ),
        no_progress_since_s=_no_progress_since(policy, snapshot, memory),
    )


def _no_progress_since(policy: Policy, snapshot: Snapshot, memory: Memory) -> float | None:
    """Since when nothing was computed while there was something to compute."""
    progress, since_s = snapshot.progress, memory.signals.no_progress_since_s
    if progress is None or not (snapshot.requests.running or snapshot.requests.waiting):
        return None
    computed = memory.signals.shrink_scheduled_total
    gap = memory.last_at_s is None or snapshot.at_s - memory.last_at_s > policy.stale_after
    if since_s is None or gap or progress.scheduled_tokens_total > computed.high:
        return snapshot.at_s
    return since_s


def _totals(snapshot: Snapshot) -> tuple[int, ...]:
    """Every counter that never goes back while an engine lives."""
    hot, progress = snapshot.hot, snapshot.progress
    return (
        snapshot.tokens.prompt_total,
        snapshot.tokens.generated_total,
        snapshot.prefix.hit_tokens_total,
        snapshot.prefix.query_tokens_total,
        snapshot.requests.finished_total,
        snapshot.requests.preemptions_total,
        hot.references_total,
        hot.loads_total,
        hot.h2d_bytes_total,
        0 if progress is None else progress.steps_total,
        0 if progress is None else progress.scheduled_tokens_total,
    )


def _went_back(before: tuple[int, ...], now: tuple[int, ...]) -> bool:
    return any(new < old for old, new in zip(before, now, strict=False))
