"""The metrics of how a node watches itself: the canary, standing calls, the engine's life."""

from __future__ import annotations

from hisparsed.control.metric_readings import (
    Metric,
    canary_state,
    engine_state,
    of_canary,
    of_engine,
)

WATCH_METRICS: tuple[Metric, ...] = (
    Metric(
        "hisparsed_state_kept",
        "1 while targets and what operators set are written to the state folder, 0 while a restart "
        "would not know the latest of them.",
        lambda s: [((), not s.not_kept)],
    ),
    Metric(
        "hisparsed_background_running",
        "1 while a task beside the ticks goes on, 0 until it begins again.",
        lambda s: [((one.name,), one.running) for one in s.background],
        ("task",),
    ),
    Metric(
        "hisparsed_background_failures_total",
        "Times that a mistake of the daemon ended such a task.",
        lambda s: [((one.name,), one.failures_total) for one in s.background],
        ("task",),
        is_counter=True,
    ),
    Metric(
        "hisparsed_canary_state",
        "1 for the state of the node's own request whose answer must never change.",
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
        "Rounds with an answer that was not that of the start; all levers are frozen after one.",
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
        "Rounds that were left out because the node had more to do than it could.",
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
        "Its part, by tokens, of the time of the engine's steps.",
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
        "1 for the state the engine is in.",
        engine_state,
        ("state",),
    ),
    Metric(
        "hisparsed_engine_deaths_total",
        "Engines of this daemon that died, hung or stood still.",
        of_engine(lambda e: e.died_total),
        is_counter=True,
    ),
    Metric(
        "hisparsed_engine_restarts_total",
        "Engines of this daemon that served after its first.",
        of_engine(lambda e: e.restarts_total),
        is_counter=True,
    ),
    Metric(
        "hisparsed_engine_planned_restarts_total",
        "Restarts of the engine that somebody asked for.",
        of_engine(lambda e: e.planned_restarts_total),
        is_counter=True,
    ),
    Metric(
        "hisparsed_engine_start_seconds",
        "How long the last start of an engine took; missing before the first.",
        of_engine(lambda e: e.last_start_s),
    ),
    Metric(
        "hisparsed_engine_values_put_aside",
        "1 while values that did not start an engine are put aside and the last good ones serve.",
        of_engine(lambda e: e.quarantined is not None),
    ),
)
