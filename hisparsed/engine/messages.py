"""Typed messages between the daemon and the engine core: one report, one command.

They cross vLLM's utility call as plain dicts. Imports neither vLLM nor torch, so the daemon
and its tests can use them alone. Counters never go back while an engine lives.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

AdmissionOrder = Literal["arrival", "held-prefix-first"]


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
    max_num_seqs: int
    row_bytes: int
    """Bytes of one KV row over all layers that share a top-k."""


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
    stalls_found: int = 0
    """Times that nothing ran though calls waited and memory was free."""
    stalls_resolved: int = 0
    stalls_given_up: int = 0
    """Calls that were failed because nothing else helped."""


class MissCurvePoint(_Message):
    """At ``multiplier``, ``misses`` of the distinct host-backed rows of a step are loaded."""

    multiplier: float
    misses: float


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


class EngineReport(_Message):
    """One consistent picture, taken between two engine steps."""

    monotonic_s: float
    steps: int
    scheduled_tokens: int
    geometry: GeometryReport
    host: HostReport
    gpu_free_blocks: int
    gpu_resident_blocks: int = 0
    """GPU blocks that hold sparse-MLA pages of running requests."""
    waiting_for_blocks: bool
    requests: RequestsReport
    hot: HotReport
    live_set_tokens: int
    live_sessions: int
    admission_order: AdmissionOrder
    max_running: int
    transition_watermark: int
    default_watermark: bool
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


class AdmissionCommand(_Message):
    order: AdmissionOrder = "arrival"
    ageing_s: float = Field(default=30.0, gt=0)
    max_running: int | None = Field(default=None, ge=1)


class EngineCommand(_Message):
    """What to change; ``None`` leaves a lever alone. Applied between steps, all or nothing."""

    offload_target_blocks: int | None = Field(default=None, ge=0)
    multiplier: float | None = Field(default=None, gt=0)
    transition_watermark: int | Literal["default"] | None = None
    admission: AdmissionCommand | None = None
    session_ttl_s: float | None = Field(default=None, gt=0)


class ApplyResult(_Message):
    """What is in force after a command; a target may be bounded below what was asked."""

    offload_target_blocks: int
    lent_blocks: int
    multiplier: float
    lease_blocks: int
    transition_watermark: int
    admission_order: AdmissionOrder
    max_running: int
    apply_us: float
