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
from tests.demo.test_summary import BOTH, OFF, ON, ORIGIN

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
    return replace(BOTH, on=on, off=off)


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
        "Prefix hits",
        "Time to first token of each call",
        "Waiting calls",
        "Host memory of each pool",
        "Reach of the smaller pool: the idle prefix that both pools can hold",
    ]
    assert "split from 700 to 650." in page
    assert "GpuPoolPressure" in page


def points_of(svg: ElementTree.Element) -> list[list[str]]:
    """The points of each line."""
    return [one.attrib["points"].split() for one in svg.iter("polyline")]


def test_the_report_says_where_its_figures_come_from() -> None:
    page = report_page(comparison())
    assert "<title>hisparsed demo, 1970-01-01 00:16 UTC</title>" in page
    for text in (ORIGIN.machine, ORIGIN.software, ORIGIN.model, "1970-01-01 00:16:40 UTC"):
        assert f"<td>{text}</td>" in page
    assert "2 recorded coding sessions at a time, a live set of 1.5 times the reach" in page
    assert "1,000 prompt tokens per second" in page


def test_a_node_has_one_colour_in_every_chart() -> None:
    page = report_page(comparison())
    legend = re.findall(r'<span class="key (\w+) c(\d)">([^<]*)</span>', page)
    nodes = {(name.removeprefix("HiSparse, "), colour) for mark, colour, name in legend}
    nodes = {(name.removeprefix("offload, "), colour) for name, colour in nodes}
    assert nodes == {("policy on", "0"), ("policy off", "1")}
    assert {mark for mark, _, name in legend if name.startswith("offload")} == {"dashed"}
    assert len(legend) == 14


def test_a_decision_before_the_calls_has_no_negative_time() -> None:
    times = re.findall(r'<tr><td class="number">([^<]*)</td><td>\w', report_page(comparison()))
    assert times == ["before"] * 5
    late = replace(comparison(), began_unix_s=2.5)
    times = re.findall(r'<tr><td class="number">([^<]*)</td><td>\w', report_page(late))
    assert times == ["before", "before", "0 s", "2 s", "2 s"]


def test_plots_leave_out_what_was_before_the_calls() -> None:
    *_, waiting, memory, reach = svgs(report_page(comparison()))
    assert [len(points) for points in points_of(memory)] == [2, 2, 2, 2]
    assert [len(points) for points in points_of(waiting)] == [1, 1]
    # 5,000 and 8,800 of 10,000 tokens, on an axis 176 high that ends at 208.
    ys = [float(point.split(",")[1]) for point in points_of(reach)[0]]
    assert ys == pytest.approx([208 - 176 * 0.5, 208 - 176 * 0.88], abs=0.1)


def test_what_a_node_says_is_no_markup() -> None:
    moves = tuple(one.model_copy(update={"sentence": "<i>4 & 5</i>"}) for one in ON.decisions)
    page = report_page(replace(comparison(), on=replace(comparison().on, decisions=moves)))
    assert "&lt;i&gt;4 &amp; 5&lt;/i&gt;" in page
    assert "<i>" not in page


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
        "A", [Series("x", [(0, 0), (11, 100)], 0), Series("absent", [], 1)], x_unit="s", y_unit="%"
    )
    (svg,) = svgs(text)
    (line,) = svg.iter("polyline")
    assert line.attrib["points"] == "58.0,208.0 606.0,32.0"
    assert "absent" not in text


def test_a_chart_names_its_units() -> None:
    (svg,) = svgs(chart("A", [Series("x", [(0, 0), (11, 90)], 0)], x_unit="s", y_unit="MiB"))
    labels = [one.text for one in svg.iter("text")]
    assert labels[0] == "MiB"
    assert labels[-3:] == ["0 s", "5 s", "10 s"]


def test_an_axis_reaches_at_least_to_what_was_asked_for() -> None:
    series = [Series("x", [(0, 0), (10, 30)], 0)]
    (svg,) = svgs(chart("A", series, x_unit="s", y_unit="%", x_most=20.0, y_most=100.0))
    (line,) = svg.iter("polyline")
    assert line.attrib["points"] == "58.0,208.0 332.0,155.2"
