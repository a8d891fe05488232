"""GPU values from NVML; where NVML has none, they are ``None``."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from hisparsed.engine.cuda.nvml import (
    GpuReader,
    GpuReading,
    GpuWatch,
    link_bytes_per_s,
    slow_reasons,
)

GIB = 2**30


class FakeNvml:
    """Two H200. ``broken``: (GPU or None, function) to the error code that it raises."""

    class NVMLError(Exception):
        def __init__(self, value: int) -> None:
            super().__init__(f"error {value}")
            self.value = value

    NVML_ERROR_GPU_IS_LOST = 15
    NVML_ERROR_RESET_REQUIRED = 16
    NVML_PCIE_UTIL_TX_BYTES = 0
    NVML_PCIE_UTIL_RX_BYTES = 1
    NOT_SUPPORTED = 3

    def __init__(self) -> None:
        self.broken: dict[tuple[int | None, str], int] = {}
        self.opened = 0
        self.mask = 0x1 | 0x4 | 0x40

    def _at(self, index: int | None, name: str) -> None:
        code = self.broken.get((index, name)) or self.broken.get((index, "all"))
        if code is not None:
            raise self.NVMLError(code)

    def nvmlInit(self) -> None:  # noqa: N802 (NVML's names, here and below)
        self._at(None, "init")
        self.opened += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.opened -= 1

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "595.10"

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        self._at(None, "count")
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        self._at(index, "handle")
        return index

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:  # noqa: N802
        self._at(handle, "capability")
        return (9, 0)

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        self._at(handle, "name")
        return "NVIDIA H200"

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        self._at(handle, "uuid")
        return f"GPU-{handle}abc"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        self._at(handle, "memory")
        return SimpleNamespace(total=141 * GIB, used=(handle + 1) * GIB)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:  # noqa: N802
        self._at(handle, "load")
        return SimpleNamespace(gpu=75, memory=20)

    def nvmlDeviceGetPcieThroughput(self, handle: int, counter: int) -> int:  # noqa: N802
        self._at(handle, "pcie")
        return 37_000_000 if counter == self.NVML_PCIE_UTIL_RX_BYTES else 1_000

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:  # noqa: N802
        self._at(handle, "generation")
        return 5

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: int) -> int:  # noqa: N802
        self._at(handle, "lanes")
        return 16

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:  # noqa: N802
        self._at(handle, "clocks")
        return self.mask

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[int]:  # noqa: N802
        self._at(handle, "processes")
        return [1]


@pytest.fixture
def nvml() -> FakeNvml:
    return FakeNvml()


def reader(nvml: FakeNvml, **environ: str) -> GpuReader:
    return GpuReader(nvml, environ)


def test_a_reading_has_base_units(nvml: FakeNvml) -> None:
    _, second = reader(nvml).read()
    assert second == GpuReading(
        index=1,
        name="NVIDIA H200",
        uuid="GPU-1abc",
        capability=(9, 0),
        memory_used_bytes=2 * GIB,
        memory_total_bytes=141 * GIB,
        utilization=0.75,
        pcie_rx_bytes_per_s=37e9,
        pcie_tx_bytes_per_s=1e6,
        pcie_link_bytes_per_s=16 * 4e9 * 128 / 130,
        slowed_by=("power-cap", "thermal-hardware"),
        processes=1,
    )


@pytest.mark.parametrize(
    ("generation", "lanes", "gigabytes"),
    [(3, 16, 15.75), (4, 16, 31.51), (5, 16, 63.02), (5, 8, 31.51)],
)
def test_a_link_carries_what_its_generation_and_lanes_allow(
    generation: int, lanes: int, gigabytes: float
) -> None:
    assert link_bytes_per_s(generation, lanes) == pytest.approx(gigabytes * 1e9, rel=1e-3)


@pytest.mark.parametrize(("generation", "lanes"), [(None, 16), (5, None), (5, 0), (99, 16)])
def test_an_unknown_link_carries_nobody_knows_what(
    generation: int | None, lanes: int | None
) -> None:
    assert link_bytes_per_s(generation, lanes) is None


@pytest.mark.parametrize(
    ("mask", "names"),
    [
        (0x0, ()),
        (0x1, ()),
        (0x2 | 0x10 | 0x100, ()),
        (0x8, ("hardware-slowdown",)),
        (0x20 | 0x80, ("thermal-software", "power-brake")),
    ],
)
def test_idleness_and_clocks_that_somebody_set_are_no_slowdown(
    mask: int, names: tuple[str, ...]
) -> None:
    assert slow_reasons(mask) == names


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("memory", "memory_used_bytes"),
        ("load", "utilization"),
        ("pcie", "pcie_rx_bytes_per_s"),
        ("clocks", "slowed_by"),
        ("processes", "processes"),
    ],
)
def test_a_query_that_fails_leaves_the_others(nvml: FakeNvml, query: str, field: str) -> None:
    nvml.broken[0, query] = FakeNvml.NOT_SUPPORTED
    first, second = reader(nvml).read()
    assert getattr(first, field) is None
    assert getattr(second, field) is not None
    known = [first.memory_total_bytes, first.utilization, first.slowed_by]
    assert sum(one is not None for one in known) >= 2
    assert not first.lost


def test_each_failing_query_is_logged_once(
    nvml: FakeNvml, caplog: pytest.LogCaptureFixture
) -> None:
    nvml.broken[0, "clocks"] = nvml.broken[1, "clocks"] = FakeNvml.NOT_SUPPORTED
    one = reader(nvml)
    with caplog.at_level(logging.WARNING, "hisparsed.gpu"):
        for _ in range(3):
            one.read()
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "GPU 0",
        "GPU 1",
    ]


@pytest.mark.parametrize(
    "code", [FakeNvml.NVML_ERROR_GPU_IS_LOST, FakeNvml.NVML_ERROR_RESET_REQUIRED]
)
def test_a_lost_gpu_is_told_as_lost_and_not_forgotten(nvml: FakeNvml, code: int) -> None:
    one = reader(nvml)
    one.read()
    nvml.broken[1, "memory"] = code
    first, second = one.read()
    assert (first.lost, second.lost) == (False, True)
    assert (second.index, second.uuid, second.memory_used_bytes) == (1, "GPU-1abc", None)
    del nvml.broken[1, "memory"]
    assert not one.read()[1].lost


def test_a_gpu_that_was_lost_before_the_first_reading_counts(nvml: FakeNvml) -> None:
    nvml.broken[1, "handle"] = FakeNvml.NVML_ERROR_GPU_IS_LOST
    first, second = reader(nvml).read()
    assert (first.lost, second.lost) == (False, True)


def test_without_a_driver_there_are_no_gpus_and_one_line(
    nvml: FakeNvml, caplog: pytest.LogCaptureFixture
) -> None:
    nvml.broken[None, "init"] = 12
    one = reader(nvml)
    with caplog.at_level(logging.WARNING, "hisparsed.gpu"):
        assert (one.read(), one.read(), one.driver()) == ((), (), None)
    assert len(caplog.records) == 1
    nvml.broken.clear()
    assert len(one.read()) == 2


@pytest.mark.parametrize(
    ("visible", "indices"),
    [("1", [1]), ("0,1", [0, 1]), ("GPU-1", [1]), ("", []), (" 1 ", [1]), ("7", [])],
)
def test_gpus_that_the_engine_may_not_use_are_left_out(
    nvml: FakeNvml, visible: str, indices: list[int]
) -> None:
    found = reader(nvml, CUDA_VISIBLE_DEVICES=visible).read()
    assert [gpu.index for gpu in found] == indices


def test_closing_closes_what_was_opened(nvml: FakeNvml) -> None:
    one = reader(nvml)
    one.read()
    one.close()
    one.close()
    assert nvml.opened == 0


def test_the_age_grows_while_nvml_hangs(nvml: FakeNvml) -> None:
    now_s = 100.0
    watch = GpuWatch(reader(nvml).read, clock=lambda: now_s)
    assert watch.status() is None
    watch.look()
    now_s = 130.0
    status = watch.status()
    assert status is not None
    assert (status.age_s, len(status.cards)) == (30.0, 2)
    assert status.cards[0].slowed_by == ["power-cap", "thermal-hardware"]


def test_readings_are_taken_by_one_thread_that_is_not_the_callers() -> None:
    threads: list[int] = []
    taken, closed = threading.Event(), threading.Event()

    def read() -> tuple[GpuReading, ...]:
        threads.append(threading.get_ident())
        if len(threads) == 1:
            raise OverflowError("a reading that nobody foresaw")
        if len(threads) == 3:
            taken.set()
        return ()

    watch = GpuWatch(read, clock=lambda: 0.0, close=closed.set, every_s=1e-4)
    watch.start()
    assert taken.wait(10), "one reading that fails ends no others"
    watch.stop()
    assert closed.is_set()
    assert set(threads) & {threading.get_ident()} == set()
    assert len(set(threads)) == 1
