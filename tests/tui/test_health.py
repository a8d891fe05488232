"""The engine's state and the GPUs, on the header, the overview, the health page and the fleet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from recorded_node import recorded, recorded_model, status_with

from hisparsed.tui import updates
from hisparsed.tui.app import TopApp
from hisparsed.tui.model import NodeModel
from hisparsed.tui.styled import Line
from hisparsed.tui.views.drawing import ViewContext
from hisparsed.tui.views.fleet import fleet_line
from hisparsed.tui.views.header import Banner, header_lines
from hisparsed.tui.views.health import (
    doctor_lines,
    engine_summary,
    gpu_rows,
    gpus_line,
    health_lines,
)
from hisparsed.tui.views.overview import overview_lines
from hisparsed.tui.views.panels import hot_lines

NOW_S = recorded("status")["at_unix_s"]
CONTEXT = ViewContext(now_s=NOW_S)
DIED = {"at_unix_s": NOW_S - 4, "why": "the engine ended by SIGKILL", "evidence": "/x/end-1.json"}
WAITS = {
    "engine.state": "restarting",
    "engine.since_unix_s": NOW_S - 4,
    "engine.next_try_unix_s": NOW_S + 8,
    "engine.ends_in_window": 2,
    "engine.last_exit": DIED,
    "lifecycle": "restarting",
}


def model_with(changes: dict[str, Any]) -> NodeModel:
    model = recorded_model()
    model.apply(updates.StatusUpdate(status_with(changes)), NOW_S)
    return model


def test_the_health_page_tells_whose_kernels_run_and_what_is_not_trusted() -> None:
    assert "kernels" not in health(recorded_model()), "only CUDA nodes have some to choose"
    kernels = {
        "reason": "Slower",
        "sentence": "vLLM's kernels, one hot size: ours take 1.31 of vLLM's time",
        "offload_trusted": False,
        "offload_sentence": "nothing is lent to the offload pool: chunk 7",
    }
    text = health(model_with({"kernels": kernels}))
    assert "kernels  Slower vLLM's kernels, one hot size: ours take 1.31 of vLLM's time" in text
    assert "UNPROVED nothing is lent to the offload pool: chunk 7" in text
    text = health(model_with({"kernels": kernels | {"offload_trusted": True}}))
    assert "UNPROVED" not in text


def header(model: NodeModel, now_s: float = NOW_S) -> str:
    lines = header_lines(model, Banner(), 120, ViewContext(now_s=now_s))
    return "\n".join(one.plain for one in lines)


def health(model: NodeModel, width: int = 120) -> str:
    return "\n".join(one.plain for one in health_lines(model, width, CONTEXT))


def test_the_header_counts_down_to_the_next_try_and_says_why() -> None:
    model = model_with(WAITS)
    words = "engine restarting for 4s, next try in 8s, 2 ends (at most 5): the engine ended by"
    assert words in header(model)
    assert "○ restarting" in header(model)
    later = header(model, NOW_S + 3)
    assert "for 7s, next try in 5s" in later
    assert "next try now" in header(model, NOW_S + 20)


def test_a_first_start_is_no_trouble_and_has_no_reason() -> None:
    starting = {"lifecycle": "starting", "observed": None, "engine.state": "starting"}
    shown = header(model_with(starting))
    assert "engine starting for 1m26s" in shown
    assert "end" not in shown.splitlines()[1].replace("engine", "")


def test_a_drain_still_has_an_engine() -> None:
    model = model_with({"engine.state": "draining", "lifecycle": "draining"})
    assert "engine draining" in header(model)
    assert not model.outdated


def test_an_engine_that_was_given_up_is_the_worst_that_can_be() -> None:
    failed = model_with({"engine.state": "failed", "engine.last_exit": DIED})
    assert failed.severity().word == "engine failed"
    assert failed.severity().rank > model_with(WAITS).severity().rank > 80
    life = engine_summary(failed.status)
    assert life is not None
    assert life.role == "bad"


def test_the_health_page_has_the_last_end_and_its_evidence() -> None:
    shown = health(model_with(WAITS))
    assert "engine   ○ restarting for 4s, next try in 8s, 2 ends (at most 5)" in shown
    assert (
        "last end 20:15:31: the engine ended by SIGKILL\n         evidence /x/end-1.json" in shown
    )
    calm = health(model_with({"engine.restarts_total": 3}))
    assert "engine   ● serving for 1m26s, 3 restarts" in calm


def test_values_that_were_quarantined_are_told_with_their_error() -> None:
    aside = {
        "at_unix_s": NOW_S,
        "error": "ValueError: no such dtype\nsecond line",
        "changes": [{"key": "engine_args.dtype", "running": "auto", "wanted": "x8"}],
    }
    model = model_with({"engine.quarantined": aside})
    shown = health(model)
    assert "QUARANTINED at 20:15:35: engine_args.dtype = x8 did not start" in shown
    assert "ValueError: no such dtype" in shown
    assert "second line" in shown
    assert "VALUES QUARANTINED" in header(model)


def test_the_fleet_shows_when_the_engine_is_tried_again() -> None:
    assert "engine: try in 8s" in fleet_line(model_with(WAITS), 120, CONTEXT).plain
    lost = model_with(WAITS)
    lost.apply(updates.Lost("gone"), NOW_S)
    assert "lost 20:15:35" in fleet_line(lost, 120, CONTEXT).plain


@pytest.mark.parametrize("told", [None, {}, {"state": "restarting"}, {"state": 7}, "x"])
def test_a_node_that_tells_little_or_nothing_is_shown_without_it(told: Any) -> None:
    model = model_with({"engine": told})
    assert header(model)
    assert ("engine   ○ restarting" in health(model)) == (told == {"state": "restarting"})
    assert model.severity().word


async def test_figures_of_an_engine_that_is_gone_turn_grey(
    make_app: Callable[..., TopApp],
) -> None:
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        view = app.screen.query_one("#overview-lines")
        assert not view._stale  # type: ignore[attr-defined]
        app.sessions[0].model.apply(updates.StatusUpdate(status_with(WAITS)), NOW_S)
        app.draw()
        assert view._stale  # type: ignore[attr-defined]


def test_a_fatal_finding_is_seen_on_every_page_and_in_the_fleet() -> None:
    model = model_with({"doctor.fatal": 1, "observed.gpu.waiting_for_blocks": True})
    assert "DOCTOR: FATAL" in header(model)
    assert model.severity().word == "doctor: fatal"


def test_a_look_that_came_to_nothing_is_told() -> None:
    assert "TROUBLE no answer for 30s" in health(model_with({"doctor.error": "no answer for 30s"}))


def test_a_recorded_journal_says_where_findings_are() -> None:
    model = model_with({"recorded": True, "doctor": None, "canary": None, "journal": None})
    shown = health(model)
    assert shown.count("its events are on page 2") == 2
    assert "journal  a recording" in shown


GPU_CONTEXT = ViewContext(now_s=recorded("status")["at_unix_s"])
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
    model.apply(updates.StatusUpdate(status), GPU_CONTEXT.now_s)
    return model


EIGHT = tuple(card(index) for index in range(8))


def plain(lines: list[Line]) -> str:
    return "\n".join(one.plain for one in lines)


def compact(*cards: dict[str, Any], width: int = 120, age_s: float = 0.4) -> str:
    (only,) = gpus_line(with_gpus(*cards, age_s=age_s), width, GPU_CONTEXT)
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
    lines = overview_lines(with_gpus(*EIGHT), *size, GPU_CONTEXT)
    assert [one.cells for one in lines] == [size[0]] * size[1]
    assert plain(lines).count("GPUs 8  fullest") == 1


def test_a_small_overview_leaves_it_to_the_health_page() -> None:
    model = with_gpus(*EIGHT)
    assert "GPUs 8" not in plain(overview_lines(model, 80, 24, GPU_CONTEXT))
    assert "GPUs 8" in plain(health_lines(model, 80, GPU_CONTEXT))


@every_size
def test_without_gpus_nothing_changes(size: tuple[int, int]) -> None:
    none, empty = recorded_model(), with_gpus()
    assert overview_lines(none, *size, GPU_CONTEXT) == overview_lines(empty, *size, GPU_CONTEXT)
    assert health_lines(none, size[0], GPU_CONTEXT) == health_lines(empty, size[0], GPU_CONTEXT)
    assert doctor_lines(none, size[0]) == doctor_lines(empty, size[0])
    assert gpus_line(none, size[0], GPU_CONTEXT) == gpu_rows(none) == []


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
        news = updates.StatusUpdate(with_gpus(*EIGHT).status or {})
        app.sessions[0].model.apply(news, GPU_CONTEXT.now_s)
        await pilot.press("5", "d")
        await pilot.pause()
        assert "&#160;&#160;7&#160;" in pilot.app.export_screenshot()


def hot(**changes: Any) -> str:
    model = recorded_model()
    status = status_with({f"observed.{name}": value for name, value in changes.items()})
    model.apply(updates.StatusUpdate(status), GPU_CONTEXT.now_s)
    return hot_lines(model, 80, GPU_CONTEXT)[0].plain


SAMPLED = {"hits_total": 900, "misses_total": 100, "h2d_bytes_total": 1, "age_s": 75.0}


def test_rare_samples_of_hot_buffers_have_their_age() -> None:
    assert hot(**{"hot.counted": False, "sampled_rows": SAMPLED}).endswith(
        "misses 10.0% as of 1m15s ago"
    )


def test_rows_that_are_counted_go_before_samples() -> None:
    assert hot(sampled_rows=SAMPLED) == hot()


def test_the_cpu_time_of_a_step_is_shown_where_it_is_known() -> None:
    def shown(step_cpu: object) -> str:
        model = recorded_model()
        status = status_with({"observed.step_cpu": step_cpu})
        model.apply(updates.StatusUpdate(status), GPU_CONTEXT.now_s)
        return "\n".join(one.plain for one in health_lines(model, 80, GPU_CONTEXT))

    assert "scheduler 4ms of CPU a step, p99 9ms, in 1m" in shown({"p50_s": 0.004, "p99_s": 0.009})
    assert "p99 9ms, busy 25%, in 1m" in shown({"p50_s": 0.004, "p99_s": 0.009, "busy_ratio": 0.25})
    assert "of CPU a step" not in shown(None)
