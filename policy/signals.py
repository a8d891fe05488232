"""The figures of a node: each is defined here once, units in every name.

``EngineReport`` is what the engine fills between two steps, ``Snapshot`` adds what the daemon
knows: one frozen picture per tick, which the policy sees, the journal keeps, the status serves and
the TUI shows. Imports the standard library only; nothing here measures, derives or judges. New
fields have defaults, as older journals do not hold them. Counters named ``*_total`` never go back
while an engine lives. A *chunk* is one distinct piece of indexer KV, whatever the number of copies
of it that are kept. ``Lever`` names what the policy can change live.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Literal


class Lever(StrEnum):
    """What the policy can change live."""

    SPLIT = "split"
    MULTIPLIER = "multiplier"
    ADMISSION = "admission"
    WATERMARK = "watermark"


class _InOrder:
    """Tells pydantic, where a snapshot is written; without importing it where one is only read."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core.core_schema import list_schema, plain_serializer_function_ser_schema

        schema = handler(source)
        items = list_schema(schema["items_schema"])
        schema["serialization"] = plain_serializer_function_ser_schema(
            sorted, return_schema=items, when_used="json"
        )
        return schema


Levers = Annotated[frozenset[Lever], _InOrder()]
"""Written in order, so that equal runs leave equal journals."""


class AdmissionOrder(StrEnum):
    """The order in which waiting calls start."""

    ARRIVAL = "arrival"
    HELD_PREFIX_FIRST = "held-prefix-first"


@dataclass(frozen=True, slots=True)
class PoolGeometry:
    """The sizes that do not change while an engine lives.

    Raises ``ValueError`` naming the field of an impossible size.
    """

    block_tokens: int
    host_block_bytes: int
    """One host block: every sparse-MLA layer of ``block_tokens`` tokens."""
    offload_chunk_tokens: int
    offload_chunk_bytes: int
    """One copy of a chunk, padding included."""
    offload_copies: int
    chunks_per_host_block: int
    """Distinct chunks that one lent host block carries, all their copies counted."""
    budget_blocks: int
    """Host blocks of both pools together."""
    max_model_len: int
    topk: int
    decode_query_len: int
    gpu_blocks_total: int
    hot_block_rows: int
    """Rows that one GPU block of a hot group holds."""
    hot_groups: int
    max_lease_blocks: int
    """Most GPU blocks of one hot group that a request can be leased."""
    max_num_seqs: int
    row_bytes: int
    """Bytes that one missed row moves over all layers of its hot group."""
    min_lease_rows: int | None = None
    """Fewest hot rows of a legal lease: top-k where scratch rows take the rest of a step's
    selection; ``None`` means decode query length x top-k."""
    max_step_tokens: int | None = None
    """Most tokens that one engine step computes; ``None`` where it is not known."""
    hot_live: bool = True
    """Whether the multiplier can change while the engine lives."""
    lends: bool = True
    """Whether the offload pool may have blocks: where its copies are not proved, it may not."""

    @property
    def least_lease_rows(self) -> int:
        return self.min_lease_rows or self.topk * self.decode_query_len

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool) and value < 1:
                raise ValueError(f"geometry.{name} is {value}; it must be at least 1")
        carried = self.chunks_per_host_block * self.offload_chunk_bytes * self.offload_copies
        if carried > self.host_block_bytes:
            raise ValueError(
                f"geometry.chunks_per_host_block is {self.chunks_per_host_block}: with "
                f"{self.offload_copies} copies that is {carried} B, more than the "
                f"{self.host_block_bytes} B of a host block"
            )


@dataclass(frozen=True, slots=True)
class GhostPoint:
    """Tokens, since the engine began, that the pool would have served with ``extra_blocks``
    host blocks more, where the other pool held its part of them."""

    extra_blocks: int
    tokens_total: int


@dataclass(frozen=True, slots=True)
class HiSparsePool:
    """Host blocks of the HiSparse pool; idle blocks are ``cached`` or ``free``."""

    capacity_blocks: int
    target_blocks: int
    in_use_blocks: int
    cached_blocks: int
    """Idle blocks that hold a reusable prefix."""
    free_blocks: int
    """Idle blocks that hold nothing."""
    ghost: tuple[GhostPoint, ...] = ()
    """Rising in ``extra_blocks``; empty where the node keeps no ghost list."""
    floor_blocks: int | None = None
    """Fewest blocks that it keeps: one request of ``max_model_len``; ``None`` where unknown."""


@dataclass(frozen=True, slots=True)
class OffloadPool:
    """The offload pool: chunks inside host blocks that it is lent."""

    capacity_chunks: int
    target_blocks: int
    lent_blocks: int
    in_use_chunks: int
    """Chunks with a load or store in flight."""
    stored_chunks: int
    ghost: tuple[GhostPoint, ...] = ()
    """Rising in ``extra_blocks``; empty where the node keeps no ghost list."""


@dataclass(frozen=True, slots=True)
class Reserve:
    """Host blocks that neither pool has, and what happens to their memory."""

    target_blocks: int = 0
    blocks: int = 0
    can_release: bool = False
    """Whether the node can give their memory back to the system."""
    releasing: bool = False
    """Whether it was asked to."""
    released_bytes: int = 0
    """Memory that the operating system has back."""


@dataclass(frozen=True, slots=True)
class LedgerViolation:
    """A broken invariant of the host ledger; ``rule`` is a stable name, ``sentence`` has the
    figures."""

    rule: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Ledger:
    """Whether the host ledger is sound; while it is not, no block moves."""

    violations: tuple[LedgerViolation, ...] = ()
    violations_total: int = 0
    given_back_blocks_total: int = 0
    """Blocks taken back from their tenants at once because nothing ran for lack of them."""


@dataclass(frozen=True, slots=True)
class GpuPool:
    """GPU blocks; ``free_blocks`` includes those that only hold a reusable prefix."""

    total_blocks: int
    free_blocks: int
    waiting_for_blocks: bool
    """Requests wait, and neither a limit nor a full step holds them."""
    head_need_blocks: int | None = None
    """GPU blocks that the head of the waiting queue needs; ``None`` where it is not known."""
    resident_blocks: int = 0
    """Blocks that hold sparse-MLA pages of running requests."""


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests by state; residency counts are of running requests."""

    running: int
    waiting: int
    preemptions_total: int
    full: int
    mixed: int
    none: int
    finished_total: int
    held_back: int | None = None
    """Waiting requests that an admission limit holds, not memory."""
    refused_total: int | None = None
    """Calls that an admission limit refused so far."""
    oldest_wait_s: float | None = None
    """How long the call at the head of the queue has waited; ``None`` when none waits."""
    stalls_total: int = 0
    """Stalls: no call ran although calls waited and memory was free."""
    stalls_resolved_total: int = 0
    stalls_given_up_total: int = 0
    """Calls that were failed because nothing else helped."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The engine's work so far; no change means a stall."""

    steps_total: int
    scheduled_tokens_total: int
    decode_seconds_total: float | None = None
    """Time of the steps without any prefill; ``None`` where it is not counted."""


@dataclass(frozen=True, slots=True)
class StepCpu:
    """CPU time of the engine thread per step, without the model: median and 99th percentile of the
    steps of the last minute."""

    p50_s: float
    p99_s: float
    busy_ratio: float | None = None
    """Share of that minute in which the thread did this work; ``None`` where fewer than two steps
    are known. With asynchronous scheduling the GPU waits for the engine core as it comes near 1."""


@dataclass(frozen=True, slots=True)
class MissPoint:
    """Predicted: at ``multiplier``, ``miss_fraction`` of host references would be loaded."""

    multiplier: float
    miss_fraction: float


@dataclass(frozen=True, slots=True)
class LeasePoint:
    """With a lease of ``blocks`` hot blocks per group, ``misses_per_step`` rows are loaded."""

    blocks: int
    misses_per_step: float


@dataclass(frozen=True, slots=True)
class RequestHot:
    """The hot buffer of one running request, in hot blocks of one group."""

    request_id: str
    lease_blocks: int
    """What it holds now."""
    target_blocks: int
    """The size that was last requested; the multiplier's lease without a request."""
    curve: tuple[LeasePoint, ...] = ()
    """Its own misses, rising in ``blocks``; empty where they are not measured."""
    weight: float = 1.0
    """The weight of one of its misses."""


@dataclass(frozen=True, slots=True)
class HotBuffers:
    """The multiplier of the next lease (hot rows / top-k) and what hot buffers did so far, in rows.

    A reference is resident (page on the GPU), a hit in the hot buffer, or a load.
    """

    multiplier: float
    references_total: int
    hits_total: int
    loads_total: int
    resident_total: int
    h2d_bytes_total: int
    predicted: tuple[MissPoint, ...] = ()
    """Exact predictions where the node makes them; empty where it does not."""
    counted: bool = True
    """Whether the node counts rows at all; where it does not, the totals mean nothing."""
    individual_leases: int = 0
    """Running requests whose lease is not the multiplier's."""
    lease_blocks: int = 0
    """Blocks of one group that the next lease takes."""
    leased_requests: int = 0
    leased_blocks: int = 0
    """GPU blocks of all leases and groups."""
    spills_total: int = 0
    """Loads that went through the shared scratch blocks, their lease being full."""
    dropped_total: int = 0
    scratch_blocks: int = 0
    """GPU blocks that all requests share for rows that do not fit their lease."""


@dataclass(frozen=True, slots=True)
class SampledRows:
    """vLLM's own counters of hot buffers, of one GPU; they move once in 2,000 worker steps.

    Totals are of ``age_s`` ago; what came after is not known.
    """

    hits_total: int
    misses_total: int
    h2d_bytes_total: int
    age_s: float


@dataclass(frozen=True, slots=True)
class LiveSet:
    """Sessions likely to come back, running ones included."""

    live_set_tokens: int
    live_sessions: int


@dataclass(frozen=True, slots=True)
class Prefix:
    """Prefix-cache tokens asked for and found."""

    hit_tokens_total: int
    query_tokens_total: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens taken in and produced."""

    prompt_total: int
    generated_total: int


@dataclass(frozen=True, slots=True)
class Latencies:
    """Of all requests so far: time to first token, and time between two tokens."""

    ttft_sum_s: float = 0.0
    ttft_count: int = 0
    itl_sum_s: float = 0.0
    itl_count: int = 0


@dataclass(frozen=True, slots=True)
class AdmissionRules:
    """Order and limits; the same shape says what is in force and what to enforce."""

    order: AdmissionOrder
    ageing_s: float
    """A call that waited this long goes before every fresh one."""
    max_running: int
    max_waiting_sessions: int | None = None
    """New sessions beyond this many waiting calls are held; ``None`` admits all."""
    retry_after_s: float = 10.0
    max_wait_s: float = 600.0
    """A call that waited this long goes first, and one held at the API is refused then."""
    when_full: Literal["wait", "refuse"] = "refuse"
    """A new session beyond the limit waits, or gets 429."""
    max_context_tokens: int | None = None
    """Longest call, prompt and asked output, that is served like any other."""
    over_max_context: Literal["wait", "refuse"] = "refuse"
    """A longer call waits until no other such call runs, or gets 400."""
    oldest_share: float = 0.2
    """Of the starts while held prefixes go first, for the call that has waited longest."""

    def __post_init__(self) -> None:
        if not self.ageing_s > 0:
            raise ValueError(f"admission.ageing_s is {self.ageing_s}; it must be above 0")
        if self.max_running < 1:
            raise ValueError(f"admission.max_running is {self.max_running}; it must be at least 1")
        if not 0 <= self.oldest_share <= 1:
            raise ValueError(f"admission.oldest_share is {self.oldest_share}; it is a share of 1")


@dataclass(frozen=True, slots=True)
class Watermark:
    """Transition watermark in GPU blocks; ``is_default`` when vLLM's own value is in force."""

    blocks: int
    is_default: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """One consistent picture of the engine, taken on its thread between two steps."""

    geometry: PoolGeometry
    hisparse: HiSparsePool
    offload: OffloadPool
    pending_blocks: int
    """Assigned to the offload pool, not yet moved."""
    draining_blocks: int
    """Recalled from the offload pool, still in use."""
    head_need_blocks: int
    """Host blocks that the head of the waiting queue needs."""
    gpu: GpuPool
    requests: Requests
    hot: HotBuffers
    sessions: LiveSet
    admission: AdmissionRules
    """The engine knows the order, its ageing and how many may run; the daemon the other limits."""
    watermark: Watermark
    progress: Progress | None = None
    """``None`` where the node does not count steps."""
    requests_hot: tuple[RequestHot, ...] = ()
    """Running requests with a hot buffer, the largest leases first, at most 256; empty where the
    node cannot size them one by one."""
    reserve: Reserve = field(default_factory=Reserve)
    ledger: Ledger = field(default_factory=Ledger)
    report_cost_s: float = 0.0
    """Engine-thread time that taking this report cost."""
    step_cpu: StepCpu | None = None
    """``None`` where no step was taken in the last minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot(EngineReport):
    """One tick. ``at_s`` is monotonic; only differences mean something."""

    at_s: float
    tick: int
    policy_generation: int
    report_age_s: float
    prefix: Prefix
    tokens: Tokens
    latencies: Latencies = field(default_factory=Latencies)
    sampled_rows: SampledRows | None = None
    """``None`` before vLLM's first sample, and where its workers take none."""
    live_levers: Levers = frozenset(Lever)
    """Levers that this node can change live; the others need a restart."""
    frozen_levers: Levers = frozenset()
    """Levers that an operator has frozen."""
