"""The data that a node's model keeps, in which order, and its judgement of the node."""

from __future__ import annotations

from typing import Any

import pytest
from recorded_node import recorded, recorded_model, status_with

from hisparsed.tui import updates
from hisparsed.tui.model import DECISIONS_KEPT, Connection, NodeModel


def test_decisions_are_newest_first_and_once_each(model: NodeModel) -> None:
    news = recorded("decisions")["decisions"]
    times = [one["at_unix_s"] for one in model.decisions]
    assert times == sorted(times, reverse=True)
    count = len(model.decisions)
    model.apply(updates.DecisionUpdate(news), 0)
    assert len(model.decisions) == count


def test_older_decisions_find_their_place(model: NodeModel) -> None:
    middle = list(model.decisions)[5]
    late = {
        **middle,
        "sequence": middle["sequence"],
        "lever": "late",
        "at_unix_s": middle["at_unix_s"],
    }
    model.apply(updates.DecisionUpdate([late]), 0)
    times = [one["at_unix_s"] for one in model.decisions]
    assert times == sorted(times, reverse=True)


def test_rings_are_bounded(model: NodeModel) -> None:
    many = [{"sequence": at, "at_unix_s": 2e9 + at, "lever": "split"} for at in range(5_000)]
    model.apply(updates.DecisionUpdate(many), 0)
    assert len(model.decisions) == DECISIONS_KEPT
    assert model.decisions[0]["sequence"] == 4_999


def test_log_lines_come_once(model: NodeModel) -> None:
    lines = recorded("logs")["lines"]
    model.apply(updates.LogUpdate(lines), 0)
    assert len(model.logs) == len(lines)


def test_another_daemon_starts_new_log_lines(model: NodeModel) -> None:
    model.apply(updates.StatusUpdate(status_with({"node.started_unix_s": 1.0})), 0)
    assert not model.logs
    assert model.requests is None


def test_losing_the_node_keeps_what_was_known(model: NodeModel) -> None:
    model.apply(updates.Lost("gone"), 50.0)
    model.apply(updates.Lost("still gone"), 60.0)
    assert model.link is Connection.LOST
    assert (model.link_since_s, model.link_why) == (50.0, "still gone")
    assert model.stale
    assert model.observed["requests"]["running"] == 6
    model.apply(updates.Connected(), 70.0)
    assert (model.link, model.link_since_s) == (Connection.CONNECTED, 70.0)


def test_a_frozen_copy_does_not_change(model: NodeModel) -> None:
    frozen = model.frozen_copy()
    before = (len(frozen.decisions), len(frozen.history), frozen.status)
    at = model.node_time_s or 0
    model.apply(updates.StatusUpdate(status_with({"at_unix_s": at + 5})), 0)
    model.apply(updates.DecisionUpdate([{"sequence": 1, "at_unix_s": 2e9, "lever": "split"}]), 0)
    assert (len(frozen.decisions), len(frozen.history), frozen.status) == before


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"lifecycle": "engine-gone"}, "engine gone"),
        ({"lifecycle": "draining"}, "draining"),
        ({"observed": None}, "no report yet"),
        ({"observed.report_age_s": 30.0}, "report is old"),
        ({"loop.failed_ticks": 2}, "ticks failed"),
        ({"journal.writing": False}, "journal stopped"),
        ({"policy.last_error": "bad"}, "policy rejected"),
        ({"observed.gpu.waiting_for_blocks": True}, "short of GPU blocks"),
        (
            {"derived.coverage": 0.4, "observed.gpu.waiting_for_blocks": False},
            "coverage low",
        ),
    ],
)
def test_severity_says_what_needs_a_person(changes: dict[str, Any], word: str) -> None:
    model = recorded_model()
    model.apply(updates.StatusUpdate(status_with(changes)), 0)
    assert model.severity().word == word


def test_a_lost_node_is_worse_than_any_serving_one(model: NodeModel) -> None:
    serving = model.severity()
    model.apply(updates.Lost("gone"), 0)
    assert model.severity().rank > serving.rank


def test_a_status_without_most_of_its_parts_is_no_error() -> None:
    model = NodeModel("old")
    model.apply(updates.StatusUpdate({"at_unix_s": 1.0, "observed": {"requests": {}}}), 0)
    assert model.severity().rank >= 0


def test_an_engine_that_starts_has_no_figures_of_now() -> None:
    model = recorded_model()
    assert model.history.latest("running", 10) is not None
    at_s = model.node_time_s or 0.0
    model.apply(updates.StatusUpdate(status_with({"observed": None, "at_unix_s": at_s + 30})), at_s)
    assert model.history.latest("running", 10) is None
