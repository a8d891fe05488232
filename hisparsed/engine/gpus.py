"""The GPUs of a node as NVML last reported them: one card each, with the age of the reading.

Part of the status document. ``None`` is what the driver does not report.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class GpuCard(_Part):
    """``index`` is NVML's; ratios are 0 to 1, traffic is bytes a second over 20 ms."""

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
