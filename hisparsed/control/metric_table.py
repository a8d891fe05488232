"""Every gauge and counter that is read from the status document: name, help, labels, reading.

Names are in base units. Labels are of bounded sets: pools, levers, states, modes, codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from hisparsed.control.status import Lifecycle, Observed, PoolStatus, Status
from hisparsed.policy.schema import Mode
from hisparsed.policy.signals import AdmissionOrder

Sample = tuple[tuple[str, ...], float]


@dataclass(frozen=True, slots=True)
class Metric:
    """``read`` yields label values and a number; nothing where it is not known yet."""

    name: str
    help: str
    read: Callable[[Status], Iterable[Sample]]
    labels: tuple[str, ...] = ()
    is_counter: bool = False


def _seen(read: Callable[[Observed], float | None]) -> Callable[[Status], Iterator[Sample]]:
    def samples(status: Status) -> Iterator[Sample]:
        value = read(status.observed) if status.observed is not None else None
        if value is not None:
            yield (), value

    return samples


def _pools(read: Callable[[PoolStatus], float]) -> Callable[[Status], Iterator[Sample]]:
    def samples(status: Status) -> Iterator[Sample]:
        if status.observed is not None:
            yield ("hisparse",), read(status.observed.pools.hisparse)
            yield ("offload",), read(status.observed.pools.offload)

    return samples


def _idle_bytes(pool: PoolStatus) -> float:
    return max(0, pool.capacity_bytes - pool.in_use_bytes)


def _residency(status: Status) -> Iterator[Sample]:
    if status.observed is not None:
        requests = status.observed.requests
        yield ("full",), requests.full
        yield ("mixed",), requests.mixed
        yield ("none",), requests.none


def _rows(status: Status) -> Iterator[Sample]:
    if status.observed is not None:
        hot = status.observed.hot
        yield ("resident",), hot.resident_total
        yield ("hit",), hot.hits_total
        yield ("load",), hot.loads_total


def _order(status: Status) -> Iterator[Sample]:
    if status.observed is not None:
        for order in AdmissionOrder:
            yield (order.value,), status.observed.admission.order is order


def _modes(status: Status) -> Iterator[Sample]:
    for lever in status.levers:
        for mode in Mode:
            yield (lever.lever.value, mode.value), lever.mode is mode


def _lifecycle(status: Status) -> Iterator[Sample]:
    for lifecycle in Lifecycle:
        yield (lifecycle.value,), status.lifecycle is lifecycle


METRICS: tuple[Metric, ...] = (
    Metric(
        "hisparsed_node_info",
        "The node: always 1, what it is in the labels.",
        lambda s: [((s.node.kind, s.node.model, s.node.version), 1)],
        ("kind", "model", "version"),
    ),
    Metric("hisparsed_lifecycle", "1 for the state the daemon is in.", _lifecycle, ("state",)),
    Metric(
        "hisparsed_host_budget_bytes",
        "Host memory of both pools together.",
        _seen(lambda o: o.pools.budget_bytes),
    ),
    Metric(
        "hisparsed_host_block_bytes",
        "Bytes of one host block, the unit that is lent.",
        _seen(lambda o: o.pools.host_block_bytes),
    ),
    Metric(
        "hisparsed_pool_target_bytes",
        "What the pool should own.",
        _pools(lambda p: p.target_bytes),
        ("pool",),
    ),
    Metric(
        "hisparsed_pool_capacity_bytes",
        "What the pool owns now; for the offload pool that is what it is lent.",
        _pools(lambda p: p.capacity_bytes),
        ("pool",),
    ),
    Metric(
        "hisparsed_pool_in_use_bytes",
        "Bytes of running requests (hisparse) or with a transfer in flight (offload).",
        _pools(lambda p: p.in_use_bytes),
        ("pool",),
    ),
    Metric(
        "hisparsed_pool_idle_bytes",
        "Capacity that is not in use, reusable prefixes included.",
        _pools(_idle_bytes),
        ("pool",),
    ),
    Metric(
        "hisparsed_pool_cached_bytes",
        "Idle bytes that hold a reusable prefix.",
        _pools(lambda p: p.cached_bytes),
        ("pool",),
    ),
    Metric(
        "hisparsed_pool_reach_tokens",
        "Tokens of idle prefix that the pool can hold.",
        _pools(lambda p: p.reach_tokens),
        ("pool",),
    ),
    Metric(
        "hisparsed_lent_blocks",
        "Host blocks that the offload pool is lent.",
        _seen(lambda o: o.pools.offload.capacity_blocks),
    ),
    Metric(
        "hisparsed_pending_bytes",
        "Promised to the offload pool, not yet taken.",
        _seen(lambda o: o.pools.pending_bytes),
    ),
    Metric(
        "hisparsed_draining_bytes",
        "Recalled from the offload pool, still busy.",
        _seen(lambda o: o.pools.draining_bytes),
    ),
    Metric(
        "hisparsed_reserve_bytes",
        "Host memory that is lent to nobody.",
        _seen(lambda o: o.pools.reserve_bytes),
    ),
    Metric(
        "hisparsed_released_bytes",
        "Memory of the reserve that the operating system has back.",
        _seen(lambda o: o.pools.released_bytes),
    ),
    Metric(
        "hisparsed_given_back_blocks_total",
        "Host blocks that came back at once because nothing ran for want of them.",
        _seen(lambda o: o.engine.given_back_blocks_total),
        is_counter=True,
    ),
    Metric(
        "hisparsed_ledger_violations_total",
        "Broken invariants of the host ledger; all levers are frozen after one.",
        _seen(lambda o: o.engine.ledger_violations_total),
        is_counter=True,
    ),
    Metric(
        "hisparsed_live_set_tokens",
        "Tokens of all sessions that are likely to come back.",
        _seen(lambda o: o.sessions.live_set_tokens),
    ),
    Metric(
        "hisparsed_live_sessions",
        "Sessions that are likely to come back.",
        _seen(lambda o: o.sessions.live),
    ),
    Metric(
        "hisparsed_coverage_ratio",
        "Smaller reach / idle live set; missing while nothing idle is live.",
        _seen(lambda o: o.sessions.coverage),
    ),
    Metric(
        "hisparsed_multiplier_ratio",
        "Hot rows of the next lease / (top-k x decode query length).",
        _seen(lambda o: o.hot.multiplier),
    ),
    Metric(
        "hisparsed_lease_blocks",
        "GPU blocks of one hot group that the next lease takes.",
        _seen(lambda o: o.hot.lease_blocks),
    ),
    Metric(
        "hisparsed_leased_blocks",
        "GPU blocks leased as hot buffers now, over all groups.",
        _seen(lambda o: o.hot.leased_blocks),
    ),
    Metric(
        "hisparsed_leased_requests",
        "Requests that hold a hot buffer.",
        _seen(lambda o: o.hot.leased_requests),
    ),
    Metric(
        "hisparsed_gpu_blocks",
        "GPU blocks of the engine.",
        _seen(lambda o: o.gpu.total_blocks),
    ),
    Metric(
        "hisparsed_gpu_free_blocks",
        "GPU blocks that are free or only hold a reusable prefix.",
        _seen(lambda o: o.gpu.free_blocks),
    ),
    Metric(
        "hisparsed_gpu_short",
        "1 while requests wait because GPU blocks are short.",
        _seen(lambda o: o.gpu.waiting_for_blocks),
    ),
    Metric(
        "hisparsed_residency_requests",
        "Running requests by residency of their sparse-MLA pages.",
        _residency,
        ("residency",),
    ),
    Metric("hisparsed_running_requests", "Running requests.", _seen(lambda o: o.requests.running)),
    Metric("hisparsed_waiting_requests", "Waiting requests.", _seen(lambda o: o.requests.waiting)),
    Metric(
        "hisparsed_held_back_requests",
        "Requests that an admission limit, not memory, keeps waiting.",
        _seen(lambda o: o.requests.held_back),
    ),
    Metric(
        "hisparsed_preemptions_total",
        "Preempted requests.",
        _seen(lambda o: o.requests.preemptions_total),
        is_counter=True,
    ),
    Metric(
        "hisparsed_hot_rows_total",
        "Rows that the indexer selected, by where they were: resident page, hot buffer (hit), "
        "or host (load).",
        _rows,
        ("found",),
        is_counter=True,
    ),
    Metric(
        "hisparsed_hot_references_total",
        "Rows that the indexer selected.",
        _seen(lambda o: o.hot.references_total),
        is_counter=True,
    ),
    Metric(
        "hisparsed_h2d_bytes_total",
        "Bytes that missed rows moved from host to GPU.",
        _seen(lambda o: o.hot.h2d_bytes_total),
        is_counter=True,
    ),
    Metric(
        "hisparsed_prefix_query_tokens_total",
        "Prompt tokens looked up in the prefix caches.",
        _seen(lambda o: o.serving.prefix_query_tokens_total),
        is_counter=True,
    ),
    Metric(
        "hisparsed_prefix_hit_tokens_total",
        "Prompt tokens found on the GPU or brought back from the host pools.",
        _seen(lambda o: o.serving.prefix_hit_tokens_total),
        is_counter=True,
    ),
    Metric(
        "hisparsed_admission_order",
        "1 for the order that waiting calls start in.",
        _order,
        ("order",),
    ),
    Metric(
        "hisparsed_admission_max_running_requests",
        "Requests that may run at once.",
        _seen(lambda o: o.admission.max_running),
    ),
    Metric(
        "hisparsed_transition_watermark_blocks",
        "Transition watermark in GPU blocks.",
        _seen(lambda o: o.watermark.blocks),
    ),
    Metric("hisparsed_lever_mode", "1 for the mode in force.", _modes, ("lever", "mode")),
    Metric(
        "hisparsed_lever_frozen",
        "1 while an operator has frozen the lever.",
        lambda s: [((one.lever.value,), one.frozen) for one in s.levers],
        ("lever",),
    ),
    Metric(
        "hisparsed_lever_pending_restart",
        "1 while the policy wants a value that needs a restart.",
        lambda s: [((one.lever.value,), one.pending_restart) for one in s.levers],
        ("lever",),
    ),
    Metric(
        "hisparsed_policy_generation",
        "Rises by one with every policy that replaced another.",
        lambda s: [((), s.policy.generation)],
    ),
    Metric(
        "hisparsed_policy_info",
        "The policy in force: always 1, the document's SHA-256 in the label.",
        lambda s: [((s.policy.content_hash,), 1)],
        ("content_hash",),
    ),
    Metric(
        "hisparsed_policy_reload_failures_total",
        "Policy documents that were rejected.",
        lambda s: [((), s.policy.reload_failures)],
        is_counter=True,
    ),
    Metric(
        "hisparsed_policy_rejected",
        "1 while the policy document that was read last is not the one in force: it has mistakes.",
        lambda s: [((), s.policy.last_error is not None)],
    ),
    Metric(
        "hisparsed_policy_overrides",
        "Values that operators set above the policy document.",
        lambda s: [((), len(s.policy.overrides))],
    ),
    Metric(
        "hisparsed_policy_schedule_active",
        "1 while the schedule entry is active.",
        lambda s: [((one.name,), one.active) for one in s.policy.schedules],
        ("schedule",),
    ),
    Metric(
        "hisparsed_pending_restart_settings",
        "Values of policy and node document that only a restart puts in force.",
        lambda s: [((), len(s.policy.pending_restart))],
    ),
    Metric(
        "hisparsed_report_age_seconds",
        "Since the engine last reported.",
        _seen(lambda o: o.engine.report_age_s),
    ),
    Metric(
        "hisparsed_report_cost_seconds",
        "Engine-thread time that the last report took.",
        _seen(lambda o: o.engine.report_cost_s),
    ),
    Metric(
        "hisparsed_report_failures_total",
        "Reports that the engine did not give.",
        _seen(lambda o: o.engine.failed_reports),
        is_counter=True,
    ),
    Metric(
        "hisparsed_apply_failures_total",
        "Commands that the engine refused or did not answer.",
        lambda s: [((), s.loop.failed_applies)],
        is_counter=True,
    ),
    Metric(
        "hisparsed_failed_ticks_total",
        "Ticks that a mistake of the daemon ended early.",
        lambda s: [((), s.loop.failed_ticks)],
        is_counter=True,
    ),
    Metric(
        "hisparsed_late_ticks_total",
        "Ticks left out because an earlier one took too long.",
        lambda s: [((), s.loop.late_ticks)],
        is_counter=True,
    ),
    Metric(
        "hisparsed_journal_writing",
        "1 while the journal's file is written, 0 while it is stopped.",
        lambda s: [((), s.journal.writing)],
    ),
    Metric(
        "hisparsed_journal_records_total",
        "Journal records written to the file.",
        lambda s: [((), s.journal.written)],
        is_counter=True,
    ),
    Metric(
        "hisparsed_journal_dropped_records_total",
        "Journal records that are in no file.",
        lambda s: [((), s.journal.dropped)],
        is_counter=True,
    ),
)
