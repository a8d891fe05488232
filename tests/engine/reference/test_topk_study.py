"""The node's own selections: predictions of the resolver hold on them, and the plot is valid."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from hisparsed.kernels.api import miss_ratio_curve
from tests.bench.topk_study import plot_svg, record_selections, replay_misses

pytestmark = pytest.mark.engine

REQUESTS, PROMPT, STEPS = 3, 600, 1050
INDEX_GROUPS = 2


@pytest.fixture(scope="module")
def selections(tmp_path_factory: pytest.TempPathFactory) -> list[list[object]]:
    found = record_selections(REQUESTS, PROMPT, STEPS, tmp_path_factory.mktemp("topk"))
    return list(found.values())


@pytest.mark.long
def test_octiles_and_ghosts_predict_the_nodes_own_misses(selections: list[list[object]]) -> None:
    positions = PROMPT + STEPS + 16
    assert len(selections) == REQUESTS * INDEX_GROUPS
    for run in selections:
        assert len(run) > 1000
        exact = miss_ratio_curve(replay_misses(run, 5.0, positions)[1], 0)
        estimate = miss_ratio_curve(replay_misses(run, 2.0, positions)[1], 0)
        assert exact is not None
        assert estimate is not None
        by_rows = dict(zip(exact.capacities, exact.miss_ratios, strict=True))
        for rows in (80, 160):
            measured, _ = replay_misses(run, rows / 64, positions)
            assert by_rows[rows] == pytest.approx(measured, abs=1e-12), "octiles are exact"
        above = dict(zip(estimate.capacities, estimate.miss_ratios, strict=True))
        for rows in (160, 320):
            measured, _ = replay_misses(run, rows / 64, positions)
            assert abs(above[rows] - measured) < 0.02, "ghosts are within 2 points"


def test_the_plot_is_an_svg_with_every_point() -> None:
    text = plot_svg({1.0: 0.4, 2.0: 0.2}, {1.5: 0.3}, {3.0: 0.1}, {1: 1.0, 2: 1.5})
    root = ElementTree.fromstring(text)  # noqa: S314 (our own text)
    names = [element.tag.rsplit("}", 1)[-1] for element in root.iter()]
    assert names.count("circle") == 3
    assert names.count("rect") == 3
    assert "1.50x" in text
