"""The node with worse misses, wider unions and requests that differ."""

from __future__ import annotations

import pytest

from hisparsed.config.node_description import NodeDescription, load_node_description
from hisparsed.engine.simulated.rows import RowModel
from hisparsed.engine.simulated.tally import Tally
from hisparsed.engine.simulated.work import Segment, StepWorker
from hisparsed.errors import UserError
from hisparsed.simulate.variation import parse_factor, varied


@pytest.fixture(scope="module")
def h200() -> NodeDescription:
    return load_node_description("8xh200-glm-5.3")


def test_misses_and_unions_grow_by_their_factors_within_what_is_possible(
    h200: NodeDescription,
) -> None:
    rows = varied(h200, misses=1.5, union=1.5, spread=None).rows
    assert [share for _, share in rows.miss_curve] == pytest.approx([0.45, 0.201, 0.1005, 0.06])
    assert rows.union == pytest.approx((1.0, 2.0, 2.475, 2.865))
    assert (
        max(share for _, share in varied(h200, misses=9, union=1, spread=None).rows.miss_curve) == 1
    )


def test_factors_of_one_change_nothing(h200: NodeDescription) -> None:
    assert varied(h200, misses=1, union=1, spread=None) == h200
    assert varied(h200, misses=1, union=1, spread=0.5).rows.spread == 0.5


@pytest.mark.parametrize("text", ["much", "0", "-1", "11", "xx2"])
def test_a_wrong_factor_is_told(text: str) -> None:
    with pytest.raises(UserError, match="--misses"):
        parse_factor("--misses", text)


def test_a_factor_may_be_written_with_a_times_sign() -> None:
    assert parse_factor("--misses", "x1.5") == parse_factor("--misses", "1.5") == 1.5


class NothingResident:
    def resident_share(self, request_id: str) -> float:
        return 0.0

    def hot_rows(self, request_id: str) -> int:
        return 4096


def test_requests_differ_by_their_locality(h200: NodeDescription) -> None:
    factors = {"near": 2.0, "far": 0.5, "mean": 1.0}
    model = RowModel(2048, h200.rows.miss_curve, h200.rows.union)
    worker = StepWorker(model, NothingResident(), 64, 2048, 8192, factors.__getitem__)
    segments = [Segment(name, 50_000, 1, 0, 50_001) for name in factors]
    worker.of(segments, Tally())
    curves = {name: dict(curve) for name, curve in worker.request_curves(1).items()}
    assert curves["near"][4096] == pytest.approx(2048 * 0.067)
    assert curves["mean"][4096] == pytest.approx(2048 * 0.134)
    assert curves["far"][4096] == pytest.approx(2048 * 0.30)
    node = dict(worker.miss_curve())
    assert node[4096] == pytest.approx((0.067 + 0.134 + 0.30) / 3)
