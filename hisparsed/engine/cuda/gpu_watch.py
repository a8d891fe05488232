"""Reads the GPUs once a second in a thread of its own, and keeps the last reading with its age.

NVML can hang for minutes while somebody pins memory, so nobody waits for it: a reading that does
not come shows as a growing age. The thread is a daemon thread, for the same reason.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from hisparsed.control.status_gpus import GpuCard, GpusStatus
from hisparsed.engine.cuda.nvml import GpuReading

log = logging.getLogger("hisparsed.engine")

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
    return GpuCard(
        index=gpu.index,
        name=gpu.name,
        uuid=gpu.uuid,
        memory_used_bytes=gpu.memory_used_bytes,
        memory_total_bytes=gpu.memory_total_bytes,
        utilization=gpu.utilization,
        pcie_rx_bytes_per_s=gpu.pcie_rx_bytes_per_s,
        pcie_tx_bytes_per_s=gpu.pcie_tx_bytes_per_s,
        pcie_link_bytes_per_s=gpu.pcie_link_bytes_per_s,
        slowed_by=None if gpu.slowed_by is None else list(gpu.slowed_by),
        lost=gpu.lost,
    )
