"""The GPUs on the overview, on the health page and among what the doctor found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from recorded_node import recorded, recorded_model, status_with

from hisparsed.tui import updates
from hisparsed.tui.app import TopApp
from hisparsed.tui.model import NodeModel
from hisparsed.tui.styled import Line
from hisparsed.tui.views.activity import hot_lines
from hisparsed.tui.views.context import ViewContext
from hisparsed.tui.views.gpus import gpu_rows, gpus_line
from hisparsed.tui.views.health import doctor_lines, health_lines
from hisparsed.tui.views.overview import overview_lines

CONTEXT = ViewContext(now_s=recorded("status")["at_unix_s"])
GIB = 2**30
SIZES = ((120, 33), (120, 40), (200, 60))
every_size = pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")


def card(index: int, **changes: Any) -> dict[str, Any]:
    return {
        "index": index,
        "name": "NVIDIA H200",
        "uuid": f"GPU-{index}",
        "memory_used_bytes": (130 + index) * GIB,
        "memory_total_bytes": 141 * GIB,
        "utilization": 0.75 + index / 100,
        "pcie_rx_bytes_per_s": (30 + index) * 1e9,
        "pcie_tx_bytes_per_s": 1e9,
        "pcie_link_bytes_per_s": 63e9,
        "slowed_by": [],
        "lost": False,
        **changes,
    }


def with_gpus(*cards: dict[str, Any], age_s: float = 0.4) -> NodeModel:
    model = recorded_model()
    status = status_with({"gpus": {"age_s": age_s, "cards": list(cards)}})
    model.apply(updates.StatusNews(status), CONTEXT.now_s)
    return model


EIGHT = tuple(card(index) for index in range(8))


def plain(lines: list[Line]) -> str:
    return "\n".join(one.plain for one in lines)


def compact(*cards: dict[str, Any], width: int = 120, age_s: float = 0.4) -> str:
    (only,) = gpus_line(with_gpus(*cards, age_s=age_s), width, CONTEXT)
    assert only.cells == width
    return only.plain


def test_one_line_has_the_fullest_the_load_and_the_busiest_link() -> None:
    said = compact(*EIGHT)
    assert said.startswith(
        "GPUs 8  fullest 137 GiB of 141 GiB  load 75% to 82%  "
        "PCIe in 34.5 GiB/s 59%, out 954 MiB/s 2% of link"
    )
    assert said.endswith(" full speed")


def test_a_link_that_is_not_known_has_no_share() -> None:
    said = compact(card(0, pcie_link_bytes_per_s=None))
    assert "PCIe in 27.9 GiB/s, out 954 MiB/s " in said
    assert "of link" not in said


def test_what_the_driver_does_not_tell_is_a_dash() -> None:
    nothing = dict.fromkeys(
        (
            "memory_used_bytes",
            "memory_total_bytes",
            "utilization",
            "pcie_rx_bytes_per_s",
            "pcie_tx_bytes_per_s",
            "pcie_link_bytes_per_s",
            "slowed_by",
        )
    )
    said = compact(card(0, **nothing))
    assert said.startswith("GPUs 1  fullest - of -  load -  PCIe in -, out -")
    assert said.endswith("clocks not known")


@pytest.mark.parametrize(
    ("cards", "end"),
    [
        ((card(0, slowed_by=["power-cap"]), card(1)), "1 at their power cap"),
        ((card(0), card(1, slowed_by=["thermal-hardware"])), "1 SLOW thermal-hardware"),
        (
            (card(0, slowed_by=["power-brake", "power-cap"]), card(1, lost=True)),
            "1 LOST  0 SLOW power-brake",
        ),
        (tuple(card(index, lost=True) for index in range(5)), "0 LOST  1 LOST  2 LOST  2 more"),
    ],
)
def test_who_is_slow_or_lost_stands_at_the_end(cards: tuple[Any, ...], end: str) -> None:
    assert compact(*cards).endswith(end)


def test_trouble_is_kept_where_there_is_no_room() -> None:
    assert "3 LOST" in compact(card(3, lost=True), width=20)


def test_a_reading_that_is_old_says_so() -> None:
    assert compact(*EIGHT, age_s=42).endswith("OLD, 42s: NVML does not answer")
    assert "OLD" not in compact(*EIGHT, age_s=5.0)


@every_size
def test_the_overview_has_the_line_and_is_no_taller(size: tuple[int, int]) -> None:
    lines = overview_lines(with_gpus(*EIGHT), *size, CONTEXT)
    assert [one.cells for one in lines] == [size[0]] * size[1]
    assert plain(lines).count("GPUs 8  fullest") == 1


def test_a_small_overview_leaves_it_to_the_health_page() -> None:
    model = with_gpus(*EIGHT)
    assert "GPUs 8" not in plain(overview_lines(model, 80, 24, CONTEXT))
    assert "GPUs 8" in plain(health_lines(model, 80, CONTEXT))


@every_size
def test_without_gpus_nothing_changes(size: tuple[int, int]) -> None:
    none, empty = recorded_model(), with_gpus()
    assert overview_lines(none, *size, CONTEXT) == overview_lines(empty, *size, CONTEXT)
    assert health_lines(none, size[0], CONTEXT) == health_lines(empty, size[0], CONTEXT)
    assert doctor_lines(none, size[0]) == doctor_lines(empty, size[0])
    assert gpus_line(none, size[0], CONTEXT) == gpu_rows(none) == []


def test_every_gpu_has_a_line_of_its_own_under_what_the_doctor_found() -> None:
    cards = (card(0), card(1, slowed_by=["thermal-software", "power-cap"]), card(2, lost=True))
    said = plain(doctor_lines(with_gpus(*cards), 120)).splitlines()[-4:]
    assert said == [
        "GPUs as of 0s ago",
        "  0 130 GiB of 141 GiB  load  75%  PCIe in 27.9 GiB/s 48%, out 954 MiB/s 2% of 58.7 GiB/s"
        "  full speed",
        "  1 131 GiB of 141 GiB  load  76%  PCIe in 28.9 GiB/s 49%, out 954 MiB/s 2% of 58.7 GiB/s"
        "  SLOW thermal-software, power-cap",
        "  2 LOST fell off the bus, or needs a reset",
    ]


async def test_the_doctors_page_shows_them(make_app: Callable[..., TopApp]) -> None:
    app = make_app()
    async with app.run_test(size=(120, 40)) as pilot:
        news = updates.StatusNews(with_gpus(*EIGHT).status or {})
        app.sessions[0].model.apply(news, CONTEXT.now_s)
        await pilot.press("5", "d")
        await pilot.pause()
        assert "&#160;&#160;7&#160;" in pilot.app.export_screenshot()


def hot(**changes: Any) -> str:
    model = recorded_model()
    status = status_with({f"observed.hot.{name}": value for name, value in changes.items()})
    model.apply(updates.StatusNews(status), CONTEXT.now_s)
    return hot_lines(model, 80, CONTEXT)[0].plain


SAMPLED = {"hits_total": 900, "misses_total": 100, "h2d_bytes_total": 1, "age_s": 75.0}


def test_rare_samples_of_hot_buffers_have_their_age() -> None:
    assert hot(hits_total=None, sampled=SAMPLED).endswith("misses 10.0% as of 1m15s ago")


def test_rows_that_are_counted_go_before_samples() -> None:
    assert hot(sampled=SAMPLED) == hot()
