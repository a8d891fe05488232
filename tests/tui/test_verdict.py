"""The first page in words: is the node well, what limits it, what the policy did last and why."""

from __future__ import annotations

from typing import Any

import pytest
from recorded_node import recorded, recorded_model, status_with

from hisparsed.tui import updates
from hisparsed.tui.model import NodeModel
from hisparsed.tui.views.drawing import ASCII, UNICODE, ViewContext, chart_box, gauge
from hisparsed.tui.views.overview import overview_lines
from hisparsed.tui.views.verdict import verdict_lines

NOW_S = recorded("status")["at_unix_s"]
CONTEXT = ViewContext(now_s=NOW_S)
CALM = {
    "observed.requests.waiting": 0,
    "observed.requests.held_back": 0,
    "derived.coverage": 2.0,
}


def model_with(changes: dict[str, Any]) -> NodeModel:
    model = recorded_model()
    model.apply(updates.StatusUpdate(status_with(changes)), NOW_S)
    return model


def words(model: NodeModel, width: int = 400) -> dict[str, str]:
    lines = [one.plain for one in verdict_lines(model, width, CONTEXT)]
    return {one[:8].strip(): one[8:] for one in lines}


def test_the_recorded_node_in_words() -> None:
    said = words(recorded_model())
    assert list(said) == ["Node", "Limit", "Policy"]
    assert said["Node"] == (
        "healthy: 6 calls run, 17 wait; first token 3.6s, 27.3 tokens/s out in 1m"
    )
    assert said["Limit"].startswith("computation: prefill fills the steps, 17 calls wait for it")
    assert "Also host memory: live sessions hold 49.8k tokens, 23.9k are in reach" in said["Limit"]
    assert said["Policy"].startswith("39s ago: Start calls in held-prefix-first instead of arriv")
    assert said["Policy"].endswith("the idle live set is 97% of the smaller reach, above 70%.")


@pytest.mark.parametrize("width", [80, 120, 200])
def test_the_words_stand_at_the_top_and_lose_nothing(width: int) -> None:
    lines = [one.plain for one in overview_lines(recorded_model(), width, 20, CONTEXT)]
    assert [lines[0][:4], lines[0].strip()[:16]] == ["Node", "Node    healthy:"]
    top = " ".join(" ".join(lines[:7]).split())
    for said in words(recorded_model()).values():
        assert said in top


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({}, "nothing: every call runs"),
        ({"observed.requests.running": 0}, "nothing: there is no load"),
        ({"derived.coverage": 0.5}, "host memory: live sessions hold 49.8k tokens, 23.9k are in "
         "reach (coverage 0.50 LOW), so prefixes are computed again"),
        ({"observed.requests.waiting": 1, "observed.gpu.waiting_for_blocks": True,
          "observed.gpu.head_need_blocks": 700},
         "GPU memory: 1 call waits; the next needs 700 blocks, 618 are free"),
        ({"observed.requests.waiting": 2, "observed.gpu.waiting_for_blocks": True,
          "observed.step_cpu": {"p50_s": 0.02, "p99_s": 0.1, "busy_ratio": 0.94},
          "levers": [{"lever": "multiplier", "reason": "EngineCoreBound"}]},
         "engine core: its CPU is busy 94% of the time, 2 calls wait for steps"),
        ({"observed.requests.waiting": 2, "observed.requests.running": 8},
         "calls at once: 2 calls wait for one of 8 places"),
        ({"observed.requests.waiting": 3, "observed.requests.held_back": 2},
         "admission: 2 calls held back by a limit"),
        ({"observed.requests.waiting": 3, "levers": [], "observed.head_need_blocks": 5_000},
         "host memory: 3 calls wait; the next needs 5,000 idle host blocks"),
        ({"observed.requests.waiting": 3, "levers": []},
         "the next steps: 3 calls wait to be scheduled; 618 GPU blocks are free"),
        ({"observed": None}, "not known, since no engine reports"),
    ],
)  # fmt: skip
def test_what_limits_it(changes: dict[str, Any], limit: str) -> None:
    calm = {} if "observed" in changes else CALM
    assert words(model_with(calm | changes))["Limit"] == limit


def test_traffic_over_pcie_limits_where_it_fills_its_budget() -> None:
    model = model_with(CALM)
    assert model.policy is not None
    model.policy["value"]["hot"]["pcie_budget"] = 130_000
    assert words(model)["Limit"] == "PCIe: loads of rows take 100% of their budget"


@pytest.mark.parametrize(
    ("changes", "node"),
    [
        ({"stalled": "nothing has moved for 31s"}, "NOT HEALTHY: nothing has moved for 31s"),
        ({"loop.failed_ticks": 1}, "NOT HEALTHY: 1 tick failed, see page 5"),
        ({"journal.writing": False, "journal.error": "disk full"},
         "NOT HEALTHY: the journal is not written: disk full"),
        ({"policy.last_error": "x", "doctor.fatal": 2},
         "NOT HEALTHY: the doctor found 2 fatal, see page 5; the policy file is invalid, so "
         "generation 2 stays in force, see page 4"),
        ({"engine.state": "restarting", "observed": None, "engine.since_unix_s": NOW_S - 4},
         "NOT SERVING, engine restarting for 4s"),
    ],
)  # fmt: skip
def test_trouble_is_a_sentence(changes: dict[str, Any], node: str) -> None:
    assert words(model_with(changes))["Node"] == node


def test_the_canary_is_no_client() -> None:
    alone = {
        "observed.requests.running": 1, "observed.requests.waiting": 0, "canary.running": True,
    }  # fmt: skip
    assert words(model_with(alone))["Node"] == (
        "healthy: no call of a client; the canary asks its own"
    )
    assert "2 calls run" in words(model_with(alone | {"observed.requests.running": 2}))["Node"]


def test_what_the_policy_may_not_do_comes_before_what_it_did() -> None:
    model = model_with({"policy.effective": "advise 1/4, frozen 2/4"})
    assert words(model)["Policy"].startswith("advise 1/4, frozen 2/4; 39s ago: Start calls")
    model.decisions.clear()
    assert words(model)["Policy"] == "advise 1/4, frozen 2/4; it has moved nothing yet"


def test_a_node_that_was_never_reached_says_why() -> None:
    model = NodeModel("n", "/run/n/control.sock")
    model.apply(updates.Lost("/run/n/control.sock: no daemon has this socket"), NOW_S)
    assert words(model) == {
        "Node": "NEVER REACHED at /run/n/control.sock: no daemon has this socket. "
        "See systemctl status hisparsed, and control_socket in hisparsed.yaml"
    }
    page = [one.plain.strip() for one in overview_lines(model, 160, 36, CONTEXT)]
    assert [one for one in page if one] == [
        "Node    NEVER REACHED at /run/n/control.sock: no daemon has this socket. "
        "See systemctl status hisparsed, and control_socket in hisparsed.yaml"
    ]


def test_a_node_has_the_name_that_it_gives_itself_unless_somebody_named_it() -> None:
    status = status_with({})
    status["node"]["name"] = "gpu-7:8000"
    for named, name in ((False, "gpu-7:8000"), (True, "n")):
        model = NodeModel("n", "/tmp/n/control.sock", named=named)  # noqa: S108 (no file)
        assert model.name == "n"
        model.apply(updates.StatusUpdate(status), NOW_S)
        assert model.name == name


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
def test_a_gauge_shows_nothing_for_next_to_nothing(glyphs: Any) -> None:
    for share, filled in ((0.00004, 0), (0.0, 0), (None, 0), (0.5, 10), (1.0, 20), (3.0, 20)):
        drawn = gauge(share, 20, "", glyphs).plain
        assert drawn == glyphs.in_use * filled + glyphs.free * (20 - filled)
    assert gauge(0.51, 20, "", UNICODE).plain[10] in UNICODE.parts


def test_a_chart_has_its_name_value_window_and_both_axes() -> None:
    title, top, *_, bottom, times, _ = (
        one.plain for one in chart_box(recorded_model(), "tokens", 40, 8, CONTEXT)
    )
    assert "tokens out 27.3/s in 1m" in title
    assert "/s┤" in top
    assert " 0┤" in bottom
    assert times.strip("│ ").split() == ["20:10", "5m", "20:15"]


def test_one_value_has_one_number_on_the_whole_page() -> None:
    for width, height in ((80, 40), (120, 36), (200, 56)):
        lines = overview_lines(recorded_model(), width, height, CONTEXT)
        page = "\n".join(one.plain for one in lines)
        for rate in ("27.3", "3.6s"):
            assert page.count(rate) >= 3
        assert "12.7" not in page, "the rate over the last ten seconds"
