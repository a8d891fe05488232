"""The report: one file that needs nothing else, with a plot of everything that was measured."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from hisparsed.demo.chart import Series, chart, nice_ticks
from hisparsed.demo.report import default_path, report_page, require_writable, write_report
from hisparsed.demo.summary import Comparison
from hisparsed.errors import UserError
from tests.demo.test_summary import BOTH, OFF, ON

HISTORY = {
    "columns": [
        "at_unix_s",
        "derived.pools.hisparse.capacity_bytes",
        "derived.pools.offload.capacity_bytes",
        "derived.pools.hisparse.reach_tokens",
        "derived.pools.offload.reach_tokens",
        "observed.requests.waiting",
    ],
    "rows": [
        [999.0, 1, 1, 1, 1, 1],
        [1001.0, 3 << 20, 1 << 20, 5000, 9000, 3],
        [1005.0, 3 << 20, 1 << 20, 9200, 8800, None],
    ],
}


def comparison() -> Comparison:
    on, off = (replace(run, history=HISTORY) for run in (ON, OFF))
    return replace(BOTH, on=on, off=off, began_unix_s=1000.0)


def svgs(page: str) -> list[ElementTree.Element]:
    return [svg_of(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def svg_of(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text)  # noqa: S314 (our own text)


def test_the_report_asks_for_nothing_outside_itself() -> None:
    page = report_page(comparison())
    assert not re.search(r"(src|href)\s*=|url\(|@import|<script|https?://", page)


def test_the_report_has_figures_plots_and_decisions() -> None:
    page = report_page(comparison())
    assert "in 50% less time" in page
    assert "first token p99" in page
    titles = [svg.attrib["aria-label"] for svg in svgs(page)]
    assert [title.split(",")[0] for title in titles] == [
        "Calls answered",
        "Prompt tokens found in the pools",
        "Wait of each call for its first token",
        "Waiting calls",
        "Host memory of both pools",
        "Idle prefix that both pools can hold",
    ]
    assert "split from 700 to 650." in page
    assert "GpuPoolPressure" in page


def points_of(svg: ElementTree.Element, series: int) -> list[list[str]]:
    """Of each line; as many of the legend come first."""
    lines = [one.attrib["points"].split() for one in svg.iter("polyline")]
    assert len(lines) == 2 * series
    return lines[series:]


def test_plots_leave_out_what_was_before_the_calls() -> None:
    *_, waiting, memory, reach = svgs(report_page(comparison()))
    assert [len(points) for points in points_of(memory, 4)] == [2, 2, 2, 2]
    assert [len(points) for points in points_of(waiting, 2)] == [1, 1]
    # 5,000 and 8,800 of 10,000 tokens, on an axis 166 high that ends at 210.
    ys = [float(point.split(",")[1]) for point in points_of(reach, 2)[0]]
    assert ys == pytest.approx([210 - 166 * 0.5, 210 - 166 * 0.88], abs=0.1)


def test_what_a_node_says_is_no_markup() -> None:
    moves = tuple(one.model_copy(update={"sentence": "<b>4 & 5</b>"}) for one in ON.decisions)
    page = report_page(replace(comparison(), on=replace(comparison().on, decisions=moves)))
    assert "&lt;b&gt;4 &amp; 5&lt;/b&gt;" in page
    assert "<b>" not in page


def test_a_report_that_cannot_be_written_says_where(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--report: cannot write .*none/report.html"):
        write_report(comparison(), tmp_path / "none" / "report.html")


def test_a_report_that_could_not_be_written_is_refused_before_the_nodes_start(
    tmp_path: Path,
) -> None:
    with pytest.raises(UserError, match=r"--report: cannot write .*none/report.html"):
        require_writable(tmp_path / "none" / "report.html")
    kept = tmp_path / "report.html"
    kept.write_text("of the last run")
    require_writable(kept)
    assert kept.read_text() == "of the last run"


def test_without_a_name_the_report_is_a_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert default_path() != default_path()


@pytest.mark.parametrize(
    ("most", "ticks"),
    [
        (0.0, [0, 1]),
        (1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (7.0, [0, 2, 4, 6, 8]),
        (101.0, [0, 50, 100, 150]),
        (20_000.0, [0, 5000, 10_000, 15_000, 20_000]),
    ],
)
def test_ticks_are_round_and_cover_the_values(most: float, ticks: list[float]) -> None:
    assert nice_ticks(most) == pytest.approx(ticks)


def test_a_chart_draws_inside_its_axes() -> None:
    text = chart(
        "A", [Series("x", [(0, 0), (10, 100)], 0), Series("absent", [], 1)], x_unit="s", y_unit="%"
    )
    svg = svg_of(text)
    (_, line) = svg.iter("polyline")
    assert line.attrib["points"] == "64.0,210.0 608.0,44.0"
    assert "absent" not in text
