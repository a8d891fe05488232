"""The statements of pages about a node: targets, pressure, predictions, origins of values."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_node import recorded, recorded_model, status_with

from hisparsed.policy.events import EventKind, EventLevel
from hisparsed.tui import updates
from hisparsed.tui.model import NodeModel
from hisparsed.tui.styled import Line
from hisparsed.tui.views.decisions import (
    Filter,
    codes,
    decision_detail,
    entries,
    entry_line,
    event_level,
    first_of,
)
from hisparsed.tui.views.drawing import ASCII, UNICODE, ViewContext, columns
from hisparsed.tui.views.header import Banner, header_lines, help_lines
from hisparsed.tui.views.health import health_lines
from hisparsed.tui.views.logs import LogFilter, log_lines
from hisparsed.tui.views.overview import overview_lines
from hisparsed.tui.views.panels import gpu_lines, host_bar, host_lines, hot_lines, request_lines
from hisparsed.tui.views.policy import lever_lines, policy_rows, summary_lines, why_and_what
from hisparsed.tui.views.requests import (
    Order,
    column_at,
    request_detail,
    request_row,
    sorted_rows,
    title_line,
)

CONTEXT = ViewContext(now_s=recorded("status")["at_unix_s"])


def plain(lines: list[Line]) -> str:
    return "\n".join(one.plain for one in lines)


def with_status(changes: dict[str, Any]) -> NodeModel:
    model = recorded_model()
    model.apply(updates.StatusUpdate(status_with(changes)), CONTEXT.now_s)
    return model


@given(st.integers(1, 250), st.integers(1, 70))
def test_the_overview_fills_its_room_exactly(width: int, height: int) -> None:
    lines = overview_lines(MODEL, width, height, CONTEXT)
    assert [one.cells for one in lines] == [width] * height


MODEL = recorded_model()


def test_an_overview_of_nothing_is_no_error() -> None:
    assert len(overview_lines(NodeModel("new"), 120, 40, CONTEXT)) == 40


def test_both_targets_are_marked_where_they_differ() -> None:
    pools = status_with({})["derived"]["pools"]
    budget = pools["budget_bytes"]
    pools["hisparse"]["target_bytes"], pools["offload"]["target_bytes"] = budget // 2, budget // 4
    marks, bar = host_bar(pools, 80, CONTEXT)
    assert marks.plain.index("▼") == 40
    assert marks.plain.index("▽") == 60
    assert bar.cells == 80


def test_what_moves_has_letters_of_its_own() -> None:
    pools = status_with({})["derived"]["pools"]
    pools["pending_bytes"] = pools["draining_bytes"] = 2_000_000
    pools["reserve_bytes"] = 1_000_000
    _, bar = host_bar(pools, 100, CONTEXT)
    assert bar.plain.count("P") == bar.plain.count("D") == 4
    model = with_status({"derived.pools.pending_bytes": 2_000_000})
    assert "P pending 1.91 MiB" in plain(host_lines(model, 100, CONTEXT))


def test_low_coverage_is_a_word_too() -> None:
    low = with_status({"derived.coverage": 0.4})
    assert "coverage 0.40 LOW" in plain(host_lines(low, 80, CONTEXT))
    idle = with_status({"derived.coverage": None})
    assert "coverage nothing idle" in plain(host_lines(idle, 80, CONTEXT))


def test_a_gpu_pool_that_is_short_says_so() -> None:
    for short in (True, False):
        model = with_status({"observed.gpu.waiting_for_blocks": short})
        assert ("SHORT" in plain(gpu_lines(model, 80, CONTEXT))) is short


def test_the_multiplier_in_force_is_marked_in_the_predicted_curve() -> None:
    curve = [{"multiplier": m, "miss_fraction": 1 / m / 4} for m in (1.0, 1.25, 2.0, 4.0)]
    model = with_status({"observed.hot.predicted": curve, "observed.hot.multiplier": 2.0})
    assert "predicted 1x 25%  [2x 12%] 4x 6%" in plain(hot_lines(model, 80, CONTEXT))
    none = with_status({"observed.hot.predicted": []})
    assert "predicted misses: none measured" in plain(hot_lines(none, 80, CONTEXT))


def test_held_back_calls_and_limits_are_said() -> None:
    model = with_status(
        {"observed.requests.held_back": 3, "observed.admission.max_waiting_sessions": 7}
    )
    words = plain(request_lines(model, 100, CONTEXT))
    assert "(3 held back)" in words
    assert "refuse beyond 7 waiting" in words


def test_a_lever_that_moves_shows_both_values() -> None:
    status = status_with({})
    status["levers"][0] |= {"current": 704, "wanted": 648, "limited_by": "LimitedByStep",
                            "pending_restart": True}  # fmt: skip
    model = recorded_model()
    model.apply(updates.StatusUpdate(status), 0)
    words = plain(lever_lines(model, 120, CONTEXT))
    assert "704 (11.0 MiB) → 648 (10.1 MiB)" in words
    assert "NEEDS RESTART NoBenefit (limited: LimitedByStep): 59 host blocks" in words
    assert "watermark  act    default" in words
    assert "FROZEN AtTarget: it is what the policy says" in words.splitlines()[3]


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
def test_charts_go_from_nothing_to_full(glyphs: Any) -> None:
    top, bottom = columns([0, 0.001, 5, 10, None], 2, 10, glyphs)
    full, least = glyphs.levels[-1], glyphs.levels[1]
    assert bottom == f" {least}{full}{full} "
    assert top == f"   {full} "


def test_a_report_that_gets_old_says_so() -> None:
    later = ViewContext(now_s=CONTEXT.now_s + 60)
    assert "OLD" in plain(header_lines(MODEL, Banner(), 120, later))
    assert "OLD" not in plain(header_lines(MODEL, Banner(), 120, CONTEXT))


def test_trouble_is_in_the_header() -> None:
    model = with_status(
        {"loop.failed_ticks": 2, "journal.writing": False, "policy.last_error": "x"}
    )
    words = plain(header_lines(model, Banner(readonly=True), 160, CONTEXT))
    for word in ("2 ticks failed", "JOURNAL STOPPED", "POLICY REJECTED", "READ-ONLY"):
        assert word in words


def test_filters_of_the_journal() -> None:
    everything = entries(MODEL, Filter())
    assert {"kind" in one for one in everything} == {True, False}
    split = entries(MODEL, Filter(lever="split"))
    assert split
    assert all(one["lever"] == "split" for one in split)
    code = codes(MODEL)[0]
    assert {one["code"] for one in entries(MODEL, Filter(code=code))} == {code}
    assert entries(MODEL, Filter(search="no such words")) == []


def test_a_decision_shows_what_is_expected_and_the_verdict_on_the_move_before() -> None:
    entry = {
        **recorded("decisions")["decisions"][0],
        "expected": {"freed_gpu_blocks": 256.0},
        "outcome": {
            "current": 5.0,
            "wanted": 4.0,
            "expected": {"freed_gpu_blocks": 512.0, "loaded_bytes_per_s": 2e9},
            "came": {"freed_gpu_blocks": 256.0},
        },
    }
    words = plain(decision_detail(entry, None, 100))
    assert "expected of this move\n  freed_gpu_blocks" in words
    assert "results of the move from 5 to 4" in words
    rows = [one.split() for one in words.splitlines() if len(one.split()) == 4]
    assert ["freed_gpu_blocks", "512", "256", "50%"] in rows
    assert ["loaded_bytes_per_s", "2,000,000,000", "-", "-"] in rows
    assert "expected of this move" not in plain(
        decision_detail({**entry, "expected": {}}, None, 100)
    )


def test_every_tick_brings_what_was_not_notable() -> None:
    model = recorded_model()
    quiet = {**recorded("decisions")["decisions"][0], "sequence": 1, "notable": False,
             "acts": False}  # fmt: skip
    model.apply(updates.DecisionUpdate([quiet]), 0)
    without = entries(model, Filter(fold=False))
    whole = entries(model, Filter(every_tick=True))
    assert len(whole) == len(without) + 1


@pytest.mark.parametrize("column", ["request", "state", "context", "resident", "hits", "age"])
def test_rows_are_sorted_with_unknown_ones_last(column: str) -> None:
    for descending in (True, False):
        rows = sorted_rows(MODEL, Order(column, descending))
        assert len(rows) == len(recorded("requests")["rows"])
        if column == "resident":
            shares = [one["resident_share"] for one in rows]
            known = [share for share in shares if share is not None]
            unknown = [None] * (len(shares) - len(known))
            assert shares == [*sorted(known, reverse=descending), *unknown]


def test_a_row_says_state_and_hit_ratio() -> None:
    row = {"request_id": "cmpl-1", "state": "preempted", "context_tokens": 12_345,
           "resident_share": 0.25, "residency": "mixed", "hot_rows": 90, "hot_capacity_rows": 128,
           "hits": 75, "loads": 25, "age_s": 61.0}  # fmt: skip
    words = request_row(row, 120, CONTEXT).plain.split()
    assert words == ["cmpl-1", "preempted", "12,345", "25%", "██······", "mixed", "90/128",
                     "75.0%", "25", "1m01s"]  # fmt: skip


@pytest.mark.parametrize(("width", "gauge"), [(80, False), (109, False), (120, True), (200, True)])
def test_the_table_of_requests_fits_every_width(width: int, gauge: bool) -> None:
    row = {"request_id": "cmpl-" + "0" * 80, "state": "preempted", "context_tokens": 1_000_000,
           "resident_share": 0.5, "residency": "mixed", "hot_rows": 8_192,
           "hot_capacity_rows": 8_192, "hits": 75, "loads": 25, "age_s": 3_600.0}  # fmt: skip
    shown = request_row(row, width, CONTEXT)
    assert shown.cells == title_line(Order(), width, CONTEXT).cells < width
    assert ("█" in shown.plain) is gauge
    assert shown.plain.endswith("1h00m")
    at = title_line(Order(), width, CONTEXT).plain.index("context")
    assert column_at(at, width) == "context"


def test_a_reason_is_whole_beside_short_settings() -> None:
    assert "PrefillBound" in plain(lever_lines(MODEL, 56, CONTEXT))


def test_help_fits_a_small_terminal() -> None:
    assert max(one.cells for one in help_lines(UNICODE, 70)) <= 70


def test_on_a_wide_screen_the_help_has_two_columns() -> None:
    narrow, wide = help_lines(UNICODE, 151), help_lines(UNICODE, 152)
    assert len(wide) < 0.6 * len(narrow)
    assert max(one.cells for one in wide) <= 152
    assert sorted(" ".join(one.plain for one in wide).split()) == sorted(
        " ".join(one.plain for one in narrow).split()
    )


def test_where_rows_are_free_the_latest_entries_show_their_whole_sentence() -> None:
    model = recorded_model("n")
    shown = "\n".join(one.plain for one in overview_lines(model, 200, 57, CONTEXT))
    journal = shown[shown.index("moves and events") :]
    assert journal.count("…") == 1, "the oldest, for which no row is left"
    assert "admission, schedules" in re.sub(r"[\s│]+", " ", journal)


def test_a_long_place_of_the_policy_leaves_room_for_its_generation() -> None:
    narrow = summary_lines(MODEL, 60, CONTEXT)
    assert narrow[0].plain.endswith("policy.yaml")
    assert narrow[1].plain.startswith("generation 2")


def test_a_mode_that_was_set_is_not_for_unset() -> None:
    model = recorded_model()
    document = recorded("policy")
    source = {"from": "override", "actor": "ann", "expires_unix_s": None}
    document["sources"]["levers.split.mode"] = source
    model.apply(updates.PolicyUpdate(document), CONTEXT.now_s)
    row = {one.key: one for one in policy_rows(model)}["levers.split.mode"]
    assert not row.overridden
    assert row.origin == "mode set by ann; m sets it back"


def test_a_journal_that_is_not_known_has_not_stopped() -> None:
    assert "STOPPED" not in plain(health_lines(NodeModel("new"), 100, CONTEXT))
    stopped = with_status({"journal.writing": False})
    assert "STOPPED" in plain(health_lines(stopped, 100, CONTEXT))


def test_every_value_says_where_it_comes_from() -> None:
    rows = {row.key: row for row in policy_rows(MODEL, now_s=CONTEXT.now_s)}
    assert rows["hot.max"].origin.startswith("line ")
    assert rows["stall_after"].origin == "default"
    override = rows["hot.step"]
    assert override.overridden
    assert override.origin.startswith("override by ada, until ")
    assert "left)" in override.origin


def test_a_node_that_does_not_say_so_is_believed() -> None:
    model = recorded_model()
    document = recorded("policy")
    for key in ("values", "sources"):
        del document[key]
    model.apply(updates.PolicyUpdate(document), 0)
    assert {row.origin for row in policy_rows(model)} == {"policy"}
    assert "hot.free_low" in {row.key for row in policy_rows(model)}


def test_the_policy_page_shows_what_is_out_of_the_ordinary() -> None:
    model = recorded_model()
    document = recorded("policy") | {
        "rejected": {
            "at_unix_s": 0.0,
            "actor": "bob",
            "error": "policy.yaml:4: broken: no\n 4 | x",
        },
        "pending_restart": [{"key": "reserve", "running": "0", "wanted": "1GiB"}],
        "schedules": [{"name": "nights", "active": True}, {"name": "days", "active": False}],
    }
    model.apply(updates.PolicyUpdate(document), 0)
    words = plain(summary_lines(model, 120, CONTEXT))
    assert "LAST RELOAD REJECTED at 00:00:00, asked by bob" in words
    assert "policy.yaml:4: broken: no" in words
    assert "NEEDS RESTART reserve: runs with 0, the policy wants 1GiB" in words
    assert "OVERRIDE hot.step = 0.5 by ada" in words
    assert "SCHEDULE IN FORCE nights" in words
    assert "days" not in words
    assert "FROZEN watermark" in words


ROLES = {EventLevel.INFO: "accent", EventLevel.WARNING: "warn", EventLevel.ERROR: "bad"}


@pytest.mark.parametrize("kind", EventKind)
def test_an_event_has_the_colour_of_its_level(kind: EventKind) -> None:
    event = {"kind": kind.value, "at_unix_s": 1.0, "sentence": "Why."}
    shown = entry_line(MODEL, event, CONTEXT)
    assert [role for part, role in shown.spans if part.strip() == kind] == [ROLES[kind.level]]


def test_the_levels_of_events_are_those_that_an_operator_needs() -> None:
    """One of each level by hand: a table that calls all of them informational would pass above."""
    levels = {kind.value: kind.level for kind in EventKind}
    assert (levels["started"], levels["journal-lost"], levels["engine-died"]) == tuple(EventLevel)


def test_an_event_of_a_kind_that_only_the_node_knows_has_the_level_that_it_serves() -> None:
    event = {"kind": "of-next-year", "level": "error", "at_unix_s": 1.0, "sentence": "Why."}
    assert "bad" in {role for _, role in entry_line(MODEL, event, CONTEXT).spans}
    assert event_level({**event, "level": "catastrophe"}) is EventLevel.INFO


def held(at_s: float, code: str, lever: str = "multiplier", *, acts: bool = False) -> Any:
    return {
        "at_unix_s": at_s, "sequence": int(at_s), "lever": lever, "code": code, "acts": acts,
        "notable": True, "current": 4.0, "wanted": 4.0,
        "sentence": f"Keep the multiplier at 4x, because of {code}.",
    }  # fmt: skip


def test_holds_that_flap_are_one_row_until_the_lever_moves() -> None:
    model = NodeModel("n")
    flapping = [held(at, f"R{at % 3}") for at in range(100, 130, 5)]
    model.apply(
        updates.DecisionUpdate(
            [*flapping, held(60, "Other", "split"), held(20, "Calm"), held(112, "Moved", acts=True)]
        ),
        0,
    )
    rows = entries(model, Filter())
    found = [(one["code"], len(one.get("folded", ()))) for one in rows]
    assert found == [("R2", 3), ("Moved", 0), ("R2", 3), ("Other", 0), ("Calm", 0)]
    assert len(entries(model, Filter(fold=False))) == 9
    assert "R2 x3" in entry_line(model, rows[0], CONTEXT).plain
    newer = [held(131, "R9")]
    model.apply(updates.DecisionUpdate(newer), 0)
    assert first_of(entries(model, Filter())[0]) == first_of(rows[0]), "the cursor stays on it"


@pytest.mark.parametrize(
    ("sentence", "why", "what"),
    [
        ("Keep it at 2x, because 3 wait.", "3 wait", "keep it at 2x"),
        ("Frozen; would move 3, because 4 wait.", "4 wait", "frozen; would move 3"),
        ("Advice only: move 3, because 4 wait.", "4 wait", "advice only: move 3"),
        ("Leave split alone: its mode is off.", "its mode is off", ""),
        ("Hold split: the last report is 9s old.", "the last report is 9s old", ""),
        ("ada froze split.", "ada froze split", ""),
    ],
)
def test_a_reason_begins_with_the_reason(sentence: str, why: str, what: str) -> None:
    assert why_and_what(sentence) == (why, what)


def log_line(at_s: float, words: str, level: int = 20) -> Any:
    return {"sequence": int(at_s), "at_unix_s": at_s, "level": level, "source": "daemon",
            "logger": "vllm.v1.metrics.loggers", "text": words}  # fmt: skip


def test_log_lines_that_repeat_stand_once_with_how_often_they_came() -> None:
    model = NodeModel("n")
    dump = "Engine 000: Avg prompt throughput: {}.5 tokens/s\n" + "more " * 60
    model.apply(
        updates.LogUpdate(
            [log_line(10, "Started."), *(log_line(20 + at, dump.format(at)) for at in range(5))]
        ),
        0,
    )
    folded = [one.plain for one in log_lines(model, LogFilter(), 80)]
    assert len(folded) == 4
    assert "5x since 00:00:20: Engine 000: Avg prompt" in folded[1]
    assert "more lines" in folded[-1]
    assert len(log_lines(model, LogFilter(fold=False), 80)) > 20
    model.apply(updates.LogUpdate([log_line(40, "Ended.")]), 0)
    assert "Ended." in log_lines(model, LogFilter(), 80)[-1].plain


def test_a_request_is_told_in_words() -> None:
    row = next(one for one in recorded("requests")["rows"] if one["residency"] == "mixed")
    said = " ".join(plain(request_detail({**row, "new_key": 7}, 80)).split())
    for words in (
        "running; arrived 32s ago, preempted 0 times",
        "1,058 tokens, 1,057 of them computed",
        "mixed: some of its pages are on the GPU",
        "512 of 512 rows filled (100%)",
        "557 loaded from host memory (2.4%)",
        "new_key 7",
    ):
        assert words in said
    assert "resident_share" not in said
