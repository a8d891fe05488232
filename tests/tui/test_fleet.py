"""Several nodes: the worst first, and one key away from each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from recorded_node import recorded_model, status_with

from hisparsed.tui import updates
from hisparsed.tui.app import FleetScreen, NodeScreen, TopApp
from hisparsed.tui.options import make_options
from hisparsed.tui.views.drawing import ViewContext
from hisparsed.tui.views.fleet import fleet_line, fleet_summary, fleet_titles, worst_first
from hisparsed.tui.widgets import LinesView, TableView

Make = Callable[..., TopApp]


def test_the_worst_comes_first_then_the_shortest_of_memory() -> None:
    fine, low, lower, lost = (recorded_model(name) for name in ("fine", "low", "lower", "lost"))
    calm = {"observed.requests.waiting": 0, "observed.gpu.waiting_for_blocks": False,
            "policy.last_error": None}  # fmt: skip
    fine.apply(updates.StatusUpdate(status_with({**calm, "derived.coverage": 3})), 0)
    low.apply(updates.StatusUpdate(status_with({**calm, "derived.coverage": 0.9})), 0)
    lower.apply(updates.StatusUpdate(status_with({**calm, "derived.coverage": 0.2})), 0)
    lost.apply(updates.Lost("gone"), 0)
    order = [model.label for model in worst_first([fine, low, lower, lost])]
    assert order == ["lost", "lower", "low", "fine"]


def test_a_line_has_a_column_below_every_title() -> None:
    model = recorded_model("gpu-node-with-a-very-long-name")
    shown = fleet_line(model, 200, ViewContext(now_s=model.node_time_s or 0)).plain
    assert shown.index("44.0 MiB") + len("44.0 MiB") == fleet_titles(200).index("host ") + 4
    assert shown.startswith("gpu-node-with-a-… ")


@pytest.mark.parametrize("width", [80, 96, 117, 118, 200])
def test_a_line_fits_its_screen_and_its_titles(width: int) -> None:
    model = recorded_model("[red]宽宽宽宽宽宽宽宽宽宽宽宽")
    shown = fleet_line(model, width, ViewContext(now_s=model.node_time_s or 0))
    assert shown.cells <= width
    titles = fleet_titles(width)
    assert titles.rstrip().endswith("TTFT" if width < 118 else "gen")
    assert len(titles) <= width


def test_nodes_of_several_versions_are_pointed_out() -> None:
    one, other = recorded_model("a"), recorded_model("b")
    other.apply(updates.StatusUpdate(status_with({"node.version": "9.9"})), 0)
    assert "MIXED VERSIONS" in fleet_summary([one, other], 160).plain
    assert "MIXED" not in fleet_summary([one, one], 160).plain


async def test_enter_goes_to_a_node_and_escape_comes_back(make_app: Make) -> None:
    app = make_app("gpu-1", "gpu-2", "gpu-3")
    app.sessions[2].model.apply(updates.Lost("gone"), 0)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        assert isinstance(app.screen, FleetScreen)
        assert list(app.screen.query_one(TableView).keys) == ["gpu-3", "gpu-1", "gpu-2"]
        await pilot.press("down", "enter")
        await pilot.pause()
        assert isinstance(app.screen, NodeScreen)
        assert app.screen.session.model.label == "gpu-1"
        await pilot.press("3", "escape")
        await pilot.pause()
        assert isinstance(app.screen, FleetScreen)
        await pilot.press("enter", "0")
        await pilot.pause()
        assert isinstance(app.screen, FleetScreen)


async def test_a_node_whose_name_has_a_slash_opens_like_any_other(make_app: Make) -> None:
    app = make_app("rack-1/gpu-7", "rack-1/gpu-8")
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("down", "enter")
        await pilot.pause()
        assert isinstance(app.screen, NodeScreen)
        assert app.screen.session.model.label == "rack-1/gpu-8"
        header = app.screen.query_one("#header", LinesView).lines[0].plain
        assert header.startswith("rack-1/gpu-8 ")


async def test_a_node_keeps_its_page(make_app: Make) -> None:
    app = make_app("gpu-1", "gpu-2")
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("enter", "4", "0", "enter")
        await pilot.pause()
        assert isinstance(app.screen, NodeScreen)
        assert app.screen.page.id == "policy"


async def test_pause_and_span_work_on_the_fleet(make_app: Make) -> None:
    app = make_app("gpu-1", "gpu-2")
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("p", "w")
        await pilot.pause()
        header = app.screen.query_one("#header", LinesView).lines[0].plain
        assert "PAUSED since" in header
        app.sessions[1].model.apply(updates.Lost("gone"), 0)
        app.draw()
        assert list(app.screen.query_one(TableView).keys) == ["gpu-1", "gpu-2"]
        await pilot.press("p")
        assert list(app.screen.query_one(TableView).keys) == ["gpu-2", "gpu-1"]


def test_nodes_of_one_name_are_told_apart() -> None:
    options = make_options(
        ["/a/control.sock", "/b/a/control.sock", "http://x:1"],
        socket=None, journal=None, readonly=False, theme="dark", ascii_only=False,
        environment={}, encoding="utf-8",
    )  # fmt: skip
    assert [one.label for one in options.addresses] == ["a", "a-2", "x:1"]


@pytest.mark.parametrize("size", [(80, 24), (200, 60)])
async def test_the_fleet_fits_small_and_large_terminals(
    make_app: Make, size: tuple[int, int]
) -> None:
    app = make_app("gpu-1", "gpu-2")
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        assert len(app.screen.query_one(TableView).keys) == 2
