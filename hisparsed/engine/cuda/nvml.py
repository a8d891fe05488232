"""GPU readings from NVML, and the thread that takes one every second.

A reading has memory, PCIe traffic, load, the reasons for low clocks, and whether the GPU is
lost. Reading raises nothing: what cannot be read is ``None`` and is logged once. ``GpusStatus`` is
what the status document shows of it.

NVML can hang for minutes while another process pins memory, so nothing waits for it. ``GpuWatch``
reads in its own daemon thread and keeps the last reading with its age: a reading that does
not come shows as a growing age. Imports neither vLLM nor torch.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, ConfigDict

from hisparsed.logs.event_ids import GPU_UNREADABLE

log = logging.getLogger("hisparsed.gpu")

SLOW_REASONS: Mapping[int, str] = {
    0x04: "power-cap",
    0x08: "hardware-slowdown",
    0x20: "thermal-software",
    0x40: "thermal-hardware",
    0x80: "power-brake",
}
"""NVML's clock event reasons that cost speed; idleness and configured clocks do not."""
LANE_BYTES_PER_S: Mapping[int, float] = {
    1: 2.5e9 / 8 * 8 / 10,
    2: 5e9 / 8 * 8 / 10,
    3: 8e9 / 8 * 128 / 130,
    4: 16e9 / 8 * 128 / 130,
    5: 32e9 / 8 * 128 / 130,
    6: 64e9 / 8 * 242 / 256,
}
"""By PCIe generation: transfers a second on one lane, less what its line coding takes."""
_KB = 1000
"""NVML gives PCIe traffic in KB per second."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class GpuCard(_Part):
    """``index`` is NVML's; ratios are 0 to 1, traffic is bytes per second over 20 ms."""

    index: int
    name: str
    uuid: str
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    utilization: float | None
    pcie_rx_bytes_per_s: float | None
    """Into the GPU."""
    pcie_tx_bytes_per_s: float | None
    pcie_link_bytes_per_s: float | None = None
    """What the link carries one way, before packet headers."""
    slowed_by: list[str] | None
    """Why its clocks are held down: power-cap, hardware-slowdown, thermal-software,
    thermal-hardware, power-brake; empty at full speed."""
    lost: bool
    """It fell off the bus or needs a reset."""


class GpusStatus(_Part):
    age_s: float
    """Of the reading; it grows while NVML does not answer."""
    cards: list[GpuCard]


@dataclass(frozen=True, slots=True)
class GpuReading:
    """``index`` is NVML's; bytes are bytes, ratios 0 to 1, traffic bytes per second."""

    index: int
    name: str = "unknown"
    uuid: str = ""
    capability: tuple[int, int] | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    utilization: float | None = None
    pcie_rx_bytes_per_s: float | None = None
    pcie_tx_bytes_per_s: float | None = None
    pcie_link_bytes_per_s: float | None = None
    """What the link carries one way before packet headers: at its highest generation, since an
    idle one rests at a lower, and as many lanes as it has now."""
    slowed_by: tuple[str, ...] | None = None
    """Of ``SLOW_REASONS``; empty at full speed."""
    processes: int | None = None
    lost: bool = False
    """It fell off the bus or needs a reset: nothing else is known any more."""


def nvidia_library() -> Any:
    """The NVML binding; importing it touches no GPU."""
    import pynvml

    return pynvml


def log_unreadable(sentence: str) -> None:
    log.warning("%s", sentence, extra={"event_id": GPU_UNREADABLE})


class GpuReader:
    """``nvml`` is ``pynvml`` or what stands for it. Not safe to share between threads.

    ``environ`` may name the GPUs (``CUDA_VISIBLE_DEVICES``); others are omitted. ``on_unreadable``
    gets one sentence for each query that fails, once.
    """

    def __init__(
        self,
        nvml: Any,
        environ: Mapping[str, str],
        *,
        on_unreadable: Callable[[str], None] = log_unreadable,
    ) -> None:
        self._nvml = nvml
        self._on_unreadable = on_unreadable
        self._visible = environ.get("CUDA_VISIBLE_DEVICES")
        self._open = False
        self._reported: set[tuple[int | None, str]] = set()
        self._known: dict[int, GpuReading] = {}
        """Values that never change, and all GPUs seen so far, so that a lost one is noticed."""

    def driver(self) -> str | None:
        """The driver's version; ``None`` where there is no driver."""
        if not self._ready():
            return None
        found = self._ask(None, "driver version", self._nvml.nvmlSystemGetDriverVersion)
        return None if found is None else str(found)

    def read(self) -> tuple[GpuReading, ...]:
        """All GPUs that the engine may use; empty where NVML does not answer at all."""
        if not self._ready():
            return tuple(self._known.values())
        count = self._ask(None, "number of GPUs", self._nvml.nvmlDeviceGetCount)
        indices = range(int(count)) if count is not None else ()
        for index in indices:
            if index not in self._known or not self._known[index].uuid:
                known = self._identify(index)
                if self._wanted(known):
                    self._known[index] = known
        return tuple(self._read(known) for known in self._known.values())

    def close(self) -> None:
        """May be opened again by the next reading."""
        if self._open:
            self._open = False
            self._ask(None, "shutdown", self._nvml.nvmlShutdown)

    def _ready(self) -> bool:
        if not self._open:
            try:
                self._nvml.nvmlInit()
            except self._nvml.NVMLError as error:
                self._report(None, "start", error)
                return False
            self._open = True
        return True

    def _wanted(self, gpu: GpuReading) -> bool:
        if self._visible is None:
            return True
        names = [name.strip() for name in self._visible.split(",")]
        return any(
            name == str(gpu.index) or (name.startswith("GPU-") and gpu.uuid.startswith(name))
            for name in names
        )

    def _identify(self, index: int) -> GpuReading:
        nvml = self._nvml
        handle = self._ask(index, "handle", lambda: nvml.nvmlDeviceGetHandleByIndex(index))
        if handle is None:
            return GpuReading(index)

        def ask(what: str, query: Callable[[Any], Any]) -> Any:
            return self._ask(index, what, lambda: query(handle))

        capability = ask("compute capability", nvml.nvmlDeviceGetCudaComputeCapability)
        return GpuReading(
            index,
            name=str(ask("name", nvml.nvmlDeviceGetName) or "unknown"),
            uuid=str(ask("uuid", nvml.nvmlDeviceGetUUID) or ""),
            capability=None if capability is None else (int(capability[0]), int(capability[1])),
        )

    def _read(self, known: GpuReading) -> GpuReading:
        nvml, index = self._nvml, known.index
        lost = False

        def ask(what: str, query: Callable[[Any], Any]) -> Any:
            nonlocal lost
            if lost:
                return None
            try:
                return query(nvml.nvmlDeviceGetHandleByIndex(index))
            except nvml.NVMLError as error:
                lost = self._is_lost(error)
                self._report(index, "GPU is lost" if lost else what, error)
                return None

        memory = ask("memory", nvml.nvmlDeviceGetMemoryInfo)
        load = ask("load", nvml.nvmlDeviceGetUtilizationRates)
        rx = ask(
            "PCIe traffic in",
            lambda handle: nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_RX_BYTES),
        )
        tx = ask(
            "PCIe traffic out",
            lambda handle: nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_TX_BYTES),
        )
        generation = ask("PCIe generation", nvml.nvmlDeviceGetMaxPcieLinkGeneration)
        lanes = ask("PCIe lanes", nvml.nvmlDeviceGetCurrPcieLinkWidth)
        mask = ask("clock event reasons", nvml.nvmlDeviceGetCurrentClocksEventReasons)
        processes = ask("processes", nvml.nvmlDeviceGetComputeRunningProcesses)
        if lost:
            return replace(known, lost=True)
        return replace(
            known,
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
            utilization=None if load is None else float(load.gpu) / 100,
            pcie_rx_bytes_per_s=None if rx is None else float(rx) * _KB,
            pcie_tx_bytes_per_s=None if tx is None else float(tx) * _KB,
            pcie_link_bytes_per_s=link_bytes_per_s(generation, lanes),
            slowed_by=None if mask is None else slow_reasons(int(mask)),
            processes=None if processes is None else len(processes),
        )

    def _is_lost(self, error: Any) -> bool:
        nvml = self._nvml
        return error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED)

    def _ask(self, index: int | None, what: str, query: Callable[[], Any]) -> Any:
        try:
            return query()
        except self._nvml.NVMLError as error:
            self._report(index, what, error)
            return None

    def _report(self, index: int | None, what: str, error: Any) -> None:
        if (index, what) in self._reported:
            return
        self._reported.add((index, what))
        where = "NVML" if index is None else f"GPU {index}"
        self._on_unreadable(f"{where}: {what}: {error}; it is logged once.")


def link_bytes_per_s(generation: int | None, lanes: int | None) -> float | None:
    """``None`` for generations that are not known."""
    lane = None if generation is None else LANE_BYTES_PER_S.get(generation)
    return None if lane is None or not lanes else lane * lanes


def slow_reasons(mask: int) -> tuple[str, ...]:
    """The names of those bits of NVML's clock event reasons that cost speed."""
    return tuple(name for bit, name in SLOW_REASONS.items() if mask & bit)


EVERY_S = 1.0
_STOP_S = 2.0


class GpuWatch:
    """``read`` is a ``GpuReader``'s, used by the thread only; ``clock`` is monotonic seconds."""

    def __init__(
        self,
        read: Callable[[], tuple[GpuReading, ...]],
        *,
        clock: Callable[[], float],
        close: Callable[[], None] = lambda: None,
        every_s: float = EVERY_S,
    ) -> None:
        self._read = read
        self._close = close
        self._clock = clock
        self._every_s = every_s
        self._last: tuple[float, tuple[GpuReading, ...]] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hisparsed-gpus", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, unless NVML holds it; that one then ends with the process."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)

    def look(self) -> None:
        """Take one reading now."""
        gpus = self._read()
        self._last = (self._clock(), gpus)

    def status(self) -> GpusStatus | None:
        """The last reading; ``None`` before the first."""
        last = self._last
        if last is None:
            return None
        at_s, gpus = last
        return GpusStatus(age_s=self._clock() - at_s, cards=[_card(gpu) for gpu in gpus])

    def _run(self) -> None:
        failing = False
        try:
            while not self._stop.is_set():
                try:
                    self.look()
                    failing = False
                except Exception:
                    if not failing:
                        log.exception("The GPUs cannot be read.")
                    failing = True
                self._stop.wait(self._every_s)
        finally:
            self._close()


def _card(gpu: GpuReading) -> GpuCard:
    return GpuCard.model_validate({name: getattr(gpu, name) for name in GpuCard.model_fields})
