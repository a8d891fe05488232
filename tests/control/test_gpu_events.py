"""When a GPU is an event: lost, back, held down for long, free for long."""

from __future__ import annotations

import pytest

from hisparsed.control.gpu_events import FREE_S, HELD_S, GpuEvents
from hisparsed.control.records import EventKind
from hisparsed.control.status_gpus import GpuCard, GpusStatus


def card(index: int = 0, *, lost: bool = False, slowed_by: list[str] | None = None) -> GpuCard:
    return GpuCard(
        index=index,
        name="H200",
        uuid=f"GPU-{index}",
        memory_used_bytes=None,
        memory_total_bytes=None,
        utilization=None,
        pcie_rx_bytes_per_s=None,
        pcie_tx_bytes_per_s=None,
        slowed_by=slowed_by,
        lost=lost,
    )


class Seen:
    """Kinds of the events that readings give, one reading after the other."""

    def __init__(self) -> None:
        self.events = GpuEvents()
        self.sentences: list[str] = []

    def __call__(self, now_s: float, *cards: GpuCard) -> list[str]:
        found = list(self.events.news(GpusStatus(age_s=0, cards=list(cards)), now_s))
        self.sentences += [sentence for _, sentence in found]
        return [kind.value for kind, _ in found]


def slow(seen: Seen, now_s: float, *reasons: str) -> list[str]:
    return seen(now_s, card(slowed_by=list(reasons)))


def test_gpus_that_are_well_are_no_event() -> None:
    seen = Seen()
    assert [seen(now_s, card(0), card(1, slowed_by=[])) for now_s in (0, 1, 100)] == [[], [], []]


def test_nothing_is_told_before_the_first_reading() -> None:
    assert list(GpuEvents().news(None, 0.0)) == []


def test_a_lost_gpu_is_told_once_with_its_name_and_once_when_it_is_back() -> None:
    seen = Seen()
    assert seen(0, card(0), card(1, lost=True)) == ["gpu-lost"]
    assert seen(1, card(0), card(1, lost=True)) == []
    assert seen(2, card(0), card(1)) == ["gpu-back"]
    assert seen(3, card(0), card(1, lost=True)) == ["gpu-lost"]
    assert seen.sentences[0].startswith("GPU 1 (H200, GPU-1) is lost")


def test_clocks_held_down_are_told_once_they_have_been_for_long() -> None:
    seen = Seen()
    assert slow(seen, 0, "thermal-hardware") == []
    assert slow(seen, HELD_S - 1, "thermal-hardware") == []
    assert slow(seen, HELD_S, "power-brake", "thermal-hardware") == ["gpu-throttled"]
    assert slow(seen, HELD_S + 1, "thermal-hardware") == []
    assert "power-brake, thermal-hardware" in seen.sentences[0]


def test_a_moment_of_heat_is_no_event() -> None:
    seen = Seen()
    slow(seen, 0, "thermal-software")
    slow(seen, HELD_S - 1)
    assert slow(seen, HELD_S + 5, "thermal-software") == []


def test_a_gpu_at_its_power_cap_is_none_either() -> None:
    seen = Seen()
    slow(seen, 0, "power-cap")
    assert slow(seen, 10 * HELD_S, "power-cap") == []


def test_full_speed_is_told_once_it_lasts() -> None:
    seen = Seen()
    slow(seen, 0, "power-brake")
    assert slow(seen, 20, "power-brake") == ["gpu-throttled"]
    assert slow(seen, 21) == []
    assert slow(seen, 30, "power-brake") == []
    assert slow(seen, 31) == []
    assert slow(seen, 30 + FREE_S, "power-cap") == []
    assert slow(seen, 31 + FREE_S) == ["gpu-full-speed"]


@pytest.mark.parametrize("reading", [card(lost=True), card(slowed_by=None)], ids=["lost", "unread"])
def test_what_cannot_be_read_is_not_full_speed(reading: GpuCard) -> None:
    seen = Seen()
    slow(seen, 0, "power-brake")
    slow(seen, 20, "power-brake")
    for now_s in (21, 21 + 2 * FREE_S):
        assert EventKind.GPU_FULL_SPEED.value not in seen(now_s, reading)


def test_each_gpu_has_its_own_time() -> None:
    seen = Seen()
    heat = ["thermal-hardware"]
    seen(0, card(0, slowed_by=heat), card(1, slowed_by=[]))
    seen(5, card(0, slowed_by=heat), card(1, slowed_by=heat))
    assert seen(10, card(0, slowed_by=heat), card(1, slowed_by=heat)) == ["gpu-throttled"]
    assert seen.sentences[0].startswith("GPU 0 ")
