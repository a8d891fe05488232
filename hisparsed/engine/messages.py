"""Typed messages between the daemon and the engine core: one report, one command.

They cross vLLM's utility call as plain dicts. Imports neither vLLM nor torch, so the daemon
and its tests can use them alone. Counters never go back while an engine lives.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

AdmissionOrder = Literal["arrival", "held-prefix-first"]
Release = Literal["possible", "pinned"]
"""Whether a node can give the memory of reserve blocks back to the operating system."""


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class GeometryReport(_Message):
    """What does not change while an engine lives. Bytes are bytes, tokens are tokens."""

    block_tokens: int
    host_block_bytes: int
    chunk_tokens: int
    chunk_bytes: int
    chunks_per_host_block: int
    offload_copies: int
    budget_blocks: int
    floor_blocks: int
    max_model_len: int
    topk: int
    decode_query_len: int
    gpu_blocks: int
    hot_groups: int
    max_lease_blocks: int
    min_lease_rows: int | None = None
    """Hot rows of the smallest lease that serves every step; ``None`` means decode query
    length x top-k."""
    scratch_blocks: int = 0
    """GPU blocks that all requests share for rows that do not fit their lease."""
    max_num_seqs: int
    row_bytes: int
    """Bytes of one KV row over all layers that share a top-k."""
    max_step_tokens: int | None = None
    """Most tokens that one step computes; ``None`` if not known."""
    hot_live: bool = True
    """Whether the node's kernels take leases of different sizes. Where not, every lease has
    ``max_lease_blocks`` for as long as the engine lives."""


class GhostReport(_Message):
    """Tokens that a pool would have served with ``extra_blocks`` host blocks more; cumulative."""

    extra_blocks: int
    tokens: int


class HostReport(_Message):
    """Host blocks by tenant and state; ``idle`` blocks may hold a reusable prefix."""

    hisparse_capacity_blocks: int
    hisparse_in_use_blocks: int
    hisparse_idle_blocks: int
    hisparse_cached_blocks: int
    offload_target_blocks: int
    lent_blocks: int
    pending_blocks: int
    draining_blocks: int
    offload_stored_chunks: int
    offload_in_flight_chunks: int
    head_need_blocks: int
    reserve_target_blocks: int = 0
    reserve_blocks: int = 0
    """Blocks that are lent to nobody."""
    release: Release = "pinned"
    released_bytes: int = 0
    """Memory of reserve blocks that the operating system has back."""
    given_back_blocks: int = 0
    """Taken back from their tenants because nothing ran for want of them; cumulative."""
    release_wanted: bool = False
    """Whether the memory of reserve blocks is being given back."""
    hisparse_ghost: list[GhostReport] = []
    """Rising in ``extra_blocks``; empty where the node keeps no ghost list."""
    offload_ghost: list[GhostReport] = []


class LedgerViolation(_Message):
    """``rule`` is a stable name; ``sentence`` has the figures."""

    rule: str
    sentence: str


class RequestsReport(_Message):
    running: int
    waiting: int
    full: int
    mixed: int
    none: int
    preemptions: int
    finished: int
    held_back: int
    """Requests that the active admission limit, not memory, keeps waiting."""
    oldest_wait_s: float | None = None
    """How long the call that has waited longest has; ``None`` when none waits or unknown."""
    stalls_found: int = 0
    """Times that nothing ran though calls waited and memory was free."""
    stalls_resolved: int = 0
    stalls_given_up: int = 0
    """Calls that were failed because nothing else helped."""


class MissCurvePoint(_Message):
    """At ``multiplier``, ``misses`` of the distinct host-backed rows of a step are loaded."""

    multiplier: float
    misses: float


class LeasePointReport(_Message):
    """With ``blocks`` hot blocks of a group, a request would load ``misses_per_step`` rows."""

    blocks: int
    misses_per_step: float


class RequestHotReport(_Message):
    """The hot buffer of one running request, in hot blocks of one group."""

    request_id: str
    lease_blocks: int
    target_blocks: int
    """What it was last told to have; the multiplier's lease where nothing was said."""
    curve: list[LeasePointReport] = []
    """Of its own misses, rising in ``blocks``; empty while they are not measured."""


class HotReport(_Message):
    multiplier: float
    lease_blocks: int
    leased_requests: int
    leased_blocks: int
    references: int
    resident: int
    hits: int
    loads: int
    spills: int
    dropped: int
    h2d_bytes: int
    miss_curve: list[MissCurvePoint]
    """Of requests at the current lease: exact up to it, estimated above; empty if unknown."""
    counted: bool = True
    """False where the node counts no rows: the counters above mean nothing then."""
    requests: list[RequestHotReport] = []
    """The largest leases first, at most 256; empty where leases cannot differ."""
    individual_leases: int = 0
    """Running requests whose lease is not the multiplier's."""


class EngineReport(_Message):
    """One consistent picture, taken between two engine steps."""

    monotonic_s: float
    steps: int
    scheduled_tokens: int
    decode_seconds: float | None = None
    """Time of the steps without any prefill."""
    geometry: GeometryReport
    host: HostReport
    gpu_free_blocks: int
    gpu_resident_blocks: int = 0
    """GPU blocks that hold sparse-MLA pages of running requests."""
    waiting_for_blocks: bool
    gpu_head_need_blocks: int | None = None
    """GPU blocks that the head of the queue needs; ``None`` when none waits or unknown."""
    requests: RequestsReport
    hot: HotReport
    live_set_tokens: int
    live_sessions: int
    admission_order: AdmissionOrder
    max_running: int
    transition_watermark: int
    default_watermark: bool
    violations: list[LedgerViolation] = Field(default_factory=list)
    """Broken invariants of the host ledger; while there are any, the levers are frozen."""
    violations_total: int = 0
    report_us: float
    """Engine-thread time that taking this report cost."""


class RequestRow(_Message):
    """One request. Rows are counted over all index groups; counters are of its life so far."""

    request_id: str
    state: str
    """running, waiting or preempted."""
    residency: str | None
    """full, mixed or none; ``None`` while it holds no page."""
    context_tokens: int
    computed_tokens: int
    resident_share: float | None
    """Share of its sparse-MLA pages that are on the GPU."""
    hot_rows: int
    hot_capacity_rows: int
    references: int
    resident: int
    hits: int
    loads: int
    preemptions: int
    age_s: float
    """Since it arrived."""


class RequestTable(_Message):
    """Running requests first, then waiting ones in the order in which they would start."""

    rows: list[RequestRow]
    running: int
    waiting: int
    omitted: int
    """Requests beyond the longest table."""
    took_us: float
    """Engine-thread time that making it cost."""


Residency = Literal["full", "mixed", "none"]


class CanaryCall(_Message):
    """A request of the daemon's own, announced before it is sent."""

    request_id: str = Field(min_length=16)
    """Random, so that no client's request begins with it."""
    residency: Residency
    """Where its pages are to be while it decodes; ``full`` leaves them alone."""


class CanaryReport(_Message):
    """What was seen of one: decode steps by the residency they were made in, and its cost."""

    full: int
    mixed: int
    none: int
    scheduled_tokens: int
    step_s: float
    """Its part, by tokens, of the time of the steps it was in."""


class AdmissionCommand(_Message):
    order: AdmissionOrder = "arrival"
    ageing_s: float = Field(default=30.0, gt=0)
    oldest_share: float = Field(default=0.2, ge=0, le=1)
    """Of the starts while held prefixes go first, for the call that has waited longest."""
    max_running: int | None = Field(default=None, ge=1)


class EngineCommand(_Message):
    """What to change; ``None`` leaves a lever alone. Applied between steps, all or nothing."""

    offload_target_blocks: int | None = Field(default=None, ge=0)
    reserve_target_blocks: int | None = Field(default=None, ge=0)
    release_reserve: bool | None = None
    """Give the memory of reserve blocks back to the operating system, now and from now on."""
    clear_violations: bool = False
    """Check the whole ledger; if it is sound, levers work again. Refused if it is not."""
    multiplier: float | None = Field(default=None, gt=0)
    """Hot rows of a lease / top-k, with drafts as without."""
    hot_leases: dict[str, int] | None = None
    """Hot blocks of one group by request, for nodes that report requests; others keep theirs.
    Unknown requests are ignored: they have ended. Empty: all go back to the multiplier's."""
    transition_watermark: int | Literal["default"] | None = None
    admission: AdmissionCommand | None = None
    session_ttl_s: float | None = Field(default=None, gt=0)


class ApplyResult(_Message):
    """What is in force after a command; a target may be bounded below what was asked."""

    offload_target_blocks: int
    lent_blocks: int
    reserve_target_blocks: int = 0
    reserve_blocks: int = 0
    multiplier: float
    lease_blocks: int
    transition_watermark: int
    admission_order: AdmissionOrder
    max_running: int
    apply_us: float
