"""The metrics of how a node watches itself: the canary, and calls that stand still."""

from __future__ import annotations

from hisparsed.control.metric_readings import Metric, canary_state, of_canary

WATCH_METRICS: tuple[Metric, ...] = (
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
)
