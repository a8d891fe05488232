"""Every gauge and counter that is read from the status document: name, help, labels, reading.

Names are in base units. Labels have bounded values: pools, levers, states, modes, reason codes, a
GPU's number on this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hisparsed.control.metrics.readings import (
    Metric,
    Sample,
    canary_state,
    core_busy,
    derived,
    engine_state,
    ghost_tokens,
    idle_bytes,
    kernels_used,
    lifecycle,
    modes,
    of_canary,
    of_engine,
    of_kernels,
    of_pools,
    order,
    residency,
    rows,
    seen,
    step_cpu,
)
from hisparsed.control.status.document import Status
from hisparsed.engine.cuda.nvml import SLOW_REASONS, GpuCard

WATCH_METRICS: tuple[Metric, ...] = (
    Metric(
        "hisparsed_state_kept",
        "1 while targets and overrides are written to the state folder, 0 while a restart would "
        "lose the latest ones.",
        lambda s: [((), not s.not_kept)],
    ),
    Metric(
        "hisparsed_background_running",
        "1 while a background task runs, 0 until it restarts.",
        lambda s: [((one.name,), one.running) for one in s.background],
        ("task",),
    ),
    Metric(
        "hisparsed_background_failures_total",
        "Background tasks that ended because of a bug in the daemon.",
        lambda s: [((one.name,), one.failures_total) for one in s.background],
        ("task",),
        is_counter=True,
    ),
    Metric(
        "hisparsed_canary_state",
        "1 for the current state of the canary.",
        canary_state,
        ("state",),
    ),
    Metric(
        "hisparsed_canary_rounds_total",
        "Rounds of three answers that ended.",
        of_canary(lambda c: c.rounds_total),
        is_counter=True,
    ),
    Metric(
        "hisparsed_canary_mismatches_total",
        "Rounds with a different answer than at start; one freezes all levers.",
        of_canary(lambda c: c.mismatches_total),
        is_counter=True,
    ),
    Metric(
        "hisparsed_canary_failures_total",
        "Rounds that did not end.",
        of_canary(lambda c: c.failed_total),
        is_counter=True,
    ),
    Metric(
        "hisparsed_canary_left_out_total",
        "Rounds that were skipped because the node was overloaded.",
        of_canary(lambda c: c.left_out_total),
        is_counter=True,
    ),
    Metric(
        "hisparsed_canary_last_round_timestamp_seconds",
        "When the last round ended, Unix time; missing before the first.",
        of_canary(lambda c: c.last_unix_s),
    ),
    Metric(
        "hisparsed_canary_tokens_total",
        "Tokens that the engine computed for it.",
        of_canary(lambda c: c.scheduled_tokens_total),
        is_counter=True,
    ),
    Metric(
        "hisparsed_canary_step_seconds_total",
        "Its share, by tokens, of the engine's step time.",
        of_canary(lambda c: c.step_seconds_total),
        is_counter=True,
    ),
    Metric(
        "hisparsed_standing_still",
        "1 while calls make no progress though memory is free, for stall_after.",
        lambda s: [((), s.stalled is not None)],
    ),
    Metric(
        "hisparsed_engine_state",
        "1 for the current state of the engine.",
        engine_state,
        ("state",),
    ),
    Metric(
        "hisparsed_engine_deaths_total",
        "Engines of this daemon that died, hung or stalled.",
        of_engine(lambda e: e.died_total),
        is_counter=True,
    ),
    Metric(
        "hisparsed_engine_restarts_total",
        "Engine starts of this daemon after the first one.",
        of_engine(lambda e: e.restarts_total),
        is_counter=True,
    ),
    Metric(
        "hisparsed_engine_planned_restarts_total",
        "Restarts of the engine on request.",
        of_engine(lambda e: e.planned_restarts_total),
        is_counter=True,
    ),
    Metric(
        "hisparsed_engine_start_seconds",
        "How long the last start of an engine took; missing before the first.",
        of_engine(lambda e: e.last_start_s),
    ),
    Metric(
        "hisparsed_hot_kernels",
        "1 for the kernels that find rows in hot buffers (hisparsed's or vLLM's), with the reason; "
        "CUDA nodes only.",
        kernels_used,
        ("kernels", "reason"),
    ),
    Metric(
        "hisparsed_hot_kernels_ratio",
        "Time of hisparsed's kernels / time of vLLM's, as measured on the slowest GPU.",
        of_kernels(lambda k: k.ratio),
    ),
    Metric(
        "hisparsed_offload_copies_trusted",
        "1 if copies of indexer chunks passed their check; otherwise nothing is lent.",
        of_kernels(lambda k: k.offload_trusted),
    ),
    Metric(
        "hisparsed_engine_values_quarantined",
        "1 while values that did not start an engine are quarantined and the last good ones are in "
        "use.",
        of_engine(lambda e: e.quarantined is not None),
    ),
)


def of_gpus(read: Callable[[GpuCard], float | None]) -> Callable[[Status], Iterator[Sample]]:
    def samples(status: Status) -> Iterator[Sample]:
        for card in status.gpus.cards if status.gpus is not None else ():
            value = read(card)
            if value is not None:
                yield (str(card.index),), value

    return samples


def _pcie(status: Status) -> Iterator[Sample]:
    for card in status.gpus.cards if status.gpus is not None else ():
        for direction, rate in (
            ("in", card.pcie_rx_bytes_per_s),
            ("out", card.pcie_tx_bytes_per_s),
        ):
            if rate is not None:
                yield (str(card.index), direction), rate


def _slowed(status: Status) -> Iterator[Sample]:
    for card in status.gpus.cards if status.gpus is not None else ():
        if card.slowed_by is not None:
            for reason in SLOW_REASONS.values():
                yield (str(card.index), reason), reason in card.slowed_by


def _age(status: Status) -> Iterator[Sample]:
    if status.gpus is not None:
        yield (), status.gpus.age_s


GPU_METRICS: tuple[Metric, ...] = (
    Metric(
        "hisparsed_gpu_memory_used_bytes",
        "Memory of the GPU in use, by all processes.",
        of_gpus(lambda card: card.memory_used_bytes),
        ("gpu",),
    ),
    Metric(
        "hisparsed_gpu_memory_total_bytes",
        "Memory of the GPU.",
        of_gpus(lambda card: card.memory_total_bytes),
        ("gpu",),
    ),
    Metric(
        "hisparsed_gpu_utilization_ratio",
        "Share of the last sample period in which a kernel ran.",
        of_gpus(lambda card: card.utilization),
        ("gpu",),
    ),
    Metric(
        "hisparsed_gpu_pcie_bytes_per_second",
        "PCIe traffic of the GPU, in (host to GPU) and out, over 20 ms.",
        _pcie,
        ("gpu", "direction"),
    ),
    Metric(
        "hisparsed_gpu_slowed",
        "1 while the GPU's clocks are reduced for that reason.",
        _slowed,
        ("gpu", "reason"),
    ),
    Metric(
        "hisparsed_gpu_lost",
        "1 once the GPU has fallen off the bus or needs a reset.",
        of_gpus(lambda card: card.lost),
        ("gpu",),
    ),
    Metric(
        "hisparsed_gpu_reading_age_seconds",
        "Age of the GPU readings; it grows while NVML does not answer.",
        _age,
    ),
    Metric(
        "hisparsed_hot_sample_age_seconds",
        "Age of vLLM's own hot-buffer counters (vllm:hisparse_*), which move once in 2,000 steps; "
        "missing before the first.",
        seen(lambda o: None if o.sampled_rows is None else o.sampled_rows.age_s),
    ),
)


METRICS: tuple[Metric, ...] = (
    *WATCH_METRICS,
    *GPU_METRICS,
    Metric(
        "hisparsed_node_info",
        "The node: always 1, with its description in the labels.",
        lambda s: [((s.node.kind, s.node.model, s.node.version), 1)],
        ("kind", "model", "version"),
    ),
    Metric("hisparsed_lifecycle", "1 for the current state of the daemon.", lifecycle, ("state",)),
    Metric(
        "hisparsed_host_budget_bytes",
        "Host memory of both pools together.",
        derived(lambda d: d.pools.budget_bytes),
    ),
    Metric(
        "hisparsed_host_block_bytes",
        "Bytes of one host block, the unit that is lent.",
        seen(lambda o: o.geometry.host_block_bytes),
    ),
    Metric(
        "hisparsed_pool_target_bytes",
        "Target size of the pool.",
        of_pools(lambda p: p.target_bytes),
        ("pool",),
    ),
    Metric(
        "hisparsed_pool_capacity_bytes",
        "Current size of the pool; for the offload pool, the blocks lent to it.",
        of_pools(lambda p: p.capacity_bytes),
        ("pool",),
    ),
    Metric(
        "hisparsed_pool_in_use_bytes",
        "Bytes of running requests (hisparse) or with a transfer in flight (offload).",
        of_pools(lambda p: p.in_use_bytes),
        ("pool",),
    ),
    Metric(
        "hisparsed_pool_idle_bytes",
        "Capacity that is not in use, reusable prefixes included.",
        of_pools(idle_bytes),
        ("pool",),
    ),
    Metric(
        "hisparsed_pool_cached_bytes",
        "Idle bytes that hold a reusable prefix.",
        of_pools(lambda p: p.cached_bytes),
        ("pool",),
    ),
    Metric(
        "hisparsed_pool_reach_tokens",
        "Tokens of idle prefix that the pool can hold.",
        of_pools(lambda p: p.reach_tokens),
        ("pool",),
    ),
    Metric(
        "hisparsed_pool_ghost_tokens_total",
        "Prefix tokens that the pool would have served with 1 % more of the host budget, where the "
        "other pool held its part.",
        ghost_tokens,
        ("pool",),
        is_counter=True,
    ),
    Metric(
        "hisparsed_lent_blocks",
        "Host blocks lent to the offload pool.",
        seen(lambda o: o.offload.lent_blocks),
    ),
    Metric(
        "hisparsed_pending_bytes",
        "Assigned to the offload pool, not yet moved.",
        derived(lambda d: d.pools.pending_bytes),
    ),
    Metric(
        "hisparsed_draining_bytes",
        "Recalled from the offload pool, still in use.",
        derived(lambda d: d.pools.draining_bytes),
    ),
    Metric(
        "hisparsed_reserve_bytes",
        "Host memory in reserve, in neither pool.",
        derived(lambda d: d.pools.reserve_bytes),
    ),
    Metric(
        "hisparsed_reserve_target_bytes",
        "Target size of the reserve.",
        derived(lambda d: d.pools.reserve_target_bytes),
    ),
    Metric(
        "hisparsed_released_bytes",
        "Memory of the reserve that was returned to the operating system.",
        seen(lambda o: o.reserve.released_bytes),
    ),
    Metric(
        "hisparsed_given_back_blocks_total",
        "Host blocks that were returned at once because no request could run without them.",
        seen(lambda o: o.ledger.given_back_blocks_total),
        is_counter=True,
    ),
    Metric(
        "hisparsed_ledger_violations_total",
        "Broken invariants of the host ledger; all levers are frozen after one.",
        seen(lambda o: o.ledger.violations_total),
        is_counter=True,
    ),
    Metric(
        "hisparsed_live_set_tokens",
        "Tokens of all sessions that are likely to return.",
        seen(lambda o: o.sessions.live_set_tokens),
    ),
    Metric(
        "hisparsed_live_sessions",
        "Sessions that are likely to return.",
        seen(lambda o: o.sessions.live_sessions),
    ),
    Metric(
        "hisparsed_coverage_ratio",
        "Smaller reach / idle live set; missing while no idle session is live.",
        derived(lambda d: d.coverage),
    ),
    Metric(
        "hisparsed_multiplier_ratio",
        "Hot rows of the next lease / top-k, with or without drafts.",
        seen(lambda o: o.hot.multiplier),
    ),
    Metric(
        "hisparsed_lease_blocks",
        "GPU blocks per hot group of the next lease.",
        seen(lambda o: o.hot.lease_blocks),
    ),
    Metric(
        "hisparsed_leased_blocks",
        "GPU blocks leased as hot buffers, over all groups.",
        seen(lambda o: o.hot.leased_blocks),
    ),
    Metric(
        "hisparsed_leased_requests",
        "Requests that hold a hot buffer.",
        seen(lambda o: o.hot.leased_requests),
    ),
    Metric(
        "hisparsed_individual_leases",
        "Running requests whose hot buffer size follows their own miss curve, not the multiplier.",
        seen(lambda o: o.hot.individual_leases),
    ),
    Metric(
        "hisparsed_gpu_blocks",
        "GPU blocks of the engine.",
        seen(lambda o: o.gpu.total_blocks),
    ),
    Metric(
        "hisparsed_gpu_free_blocks",
        "GPU blocks that are free or only hold a reusable prefix.",
        seen(lambda o: o.gpu.free_blocks),
    ),
    Metric(
        "hisparsed_gpu_short",
        "1 while requests wait because GPU blocks are short.",
        seen(lambda o: o.gpu.waiting_for_blocks),
    ),
    Metric(
        "hisparsed_gpu_head_need_blocks",
        "GPU blocks that the head of the waiting queue needed when it was last refused; missing if "
        "none.",
        seen(lambda o: o.gpu.head_need_blocks),
    ),
    Metric(
        "hisparsed_residency_requests",
        "Running requests by residency of their sparse-MLA pages.",
        residency,
        ("residency",),
    ),
    Metric("hisparsed_running_requests", "Running requests.", seen(lambda o: o.requests.running)),
    Metric("hisparsed_waiting_requests", "Waiting requests.", seen(lambda o: o.requests.waiting)),
    Metric(
        "hisparsed_held_back_requests",
        "Requests that wait for an admission limit, not for memory.",
        seen(lambda o: o.requests.held_back),
    ),
    Metric(
        "hisparsed_oldest_wait_seconds",
        "Wait of the call that has waited longest; missing while none waits.",
        seen(lambda o: o.requests.oldest_wait_s),
    ),
    Metric(
        "hisparsed_stalls_total",
        "Stalls: no call ran although calls waited and memory was free.",
        seen(lambda o: o.requests.stalls_total),
        is_counter=True,
    ),
    Metric(
        "hisparsed_stalls_resolved_total",
        "Stalls after which calls ran again.",
        seen(lambda o: o.requests.stalls_resolved_total),
        is_counter=True,
    ),
    Metric(
        "hisparsed_stalls_given_up_total",
        "Calls that were failed to end a stall.",
        seen(lambda o: o.requests.stalls_given_up_total),
        is_counter=True,
    ),
    Metric(
        "hisparsed_preemptions_total",
        "Preempted requests.",
        seen(lambda o: o.requests.preemptions_total),
        is_counter=True,
    ),
    Metric(
        "hisparsed_hot_rows_total",
        "Rows that the indexer selected, by where they were: resident page, hot buffer (hit), "
        "or host (load).",
        rows,
        ("found",),
        is_counter=True,
    ),
    Metric(
        "hisparsed_hot_references_total",
        "Rows that the indexer selected.",
        seen(lambda o: o.hot.references_total if o.hot.counted else None),
        is_counter=True,
    ),
    Metric(
        "hisparsed_h2d_bytes_total",
        "Bytes that missed rows moved from host to GPU.",
        seen(lambda o: o.hot.h2d_bytes_total if o.hot.counted else None),
        is_counter=True,
    ),
    Metric(
        "hisparsed_prefix_query_tokens_total",
        "Prompt tokens looked up in the prefix caches.",
        seen(lambda o: o.prefix.query_tokens_total),
        is_counter=True,
    ),
    Metric(
        "hisparsed_prefix_hit_tokens_total",
        "Prompt tokens found on the GPU or loaded from the host pools.",
        seen(lambda o: o.prefix.hit_tokens_total),
        is_counter=True,
    ),
    Metric(
        "hisparsed_admission_order",
        "1 for the order in which waiting calls start.",
        order,
        ("order",),
    ),
    Metric(
        "hisparsed_admission_max_running_requests",
        "Requests that may run at once.",
        seen(lambda o: o.admission.max_running),
    ),
    Metric(
        "hisparsed_transition_watermark_blocks",
        "Transition watermark in GPU blocks.",
        seen(lambda o: o.watermark.blocks),
    ),
    Metric("hisparsed_lever_mode", "1 for the mode in effect.", modes, ("lever", "mode")),
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
        "Generation of the policy; increases by one with every new policy.",
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
        "1 while the policy document that was read last is invalid and not in effect.",
        lambda s: [((), s.policy.last_error is not None)],
    ),
    Metric(
        "hisparsed_policy_overrides",
        "Values of the policy document that operators override.",
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
        "Values of policy and node document that take effect at a restart.",
        lambda s: [((), len(s.policy.pending_restart))],
    ),
    Metric(
        "hisparsed_report_age_seconds",
        "Time since the last report of the engine.",
        seen(lambda o: o.report_age_s),
    ),
    Metric(
        "hisparsed_report_cost_seconds",
        "Engine-thread time that the last report took.",
        seen(lambda o: o.report_cost_s),
    ),
    Metric(
        "hisparsed_step_cpu_seconds",
        "CPU time of the engine thread per step, without the model, over the last minute.",
        step_cpu,
        ("quantile",),
    ),
    Metric(
        "hisparsed_engine_core_busy_ratio",
        "Share of the last minute that the engine thread spent on steps, the model apart.",
        core_busy,
    ),
    Metric(
        "hisparsed_report_failures_total",
        "Reports of the engine that failed.",
        lambda s: [((), s.loop.failed_reports)],
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
        "Ticks that ended early because of a bug in the daemon.",
        lambda s: [((), s.loop.failed_ticks)],
        is_counter=True,
    ),
    Metric(
        "hisparsed_late_ticks_total",
        "Ticks skipped because an earlier one took too long.",
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
        "Journal records that were not written.",
        lambda s: [((), s.journal.dropped)],
        is_counter=True,
    ),
)
