"""The metrics of GPUs, as NVML tells, and of vLLM's rare samples of hot buffers.

Labels are bounded: a GPU's number on this machine, a direction, and five reasons for slow clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hisparsed.control.metric_readings import Metric, Sample, seen
from hisparsed.control.status import Status
from hisparsed.control.status_gpus import GpuCard
from hisparsed.engine.cuda.nvml import SLOW_REASONS


def of_gpus(read: Callable[[GpuCard], float | None]) -> Callable[[Status], Iterator[Sample]]:
    def samples(status: Status) -> Iterator[Sample]:
        for card in status.gpus.cards if status.gpus is not None else ():
            value = read(card)
            if value is not None:
                yield (str(card.index),), value

    return samples


def _pcie(status: Status) -> Iterator[Sample]:
    for card in status.gpus.cards if status.gpus is not None else ():
        for direction, rate in (
            ("in", card.pcie_rx_bytes_per_s),
            ("out", card.pcie_tx_bytes_per_s),
        ):
            if rate is not None:
                yield (str(card.index), direction), rate


def _slowed(status: Status) -> Iterator[Sample]:
    for card in status.gpus.cards if status.gpus is not None else ():
        if card.slowed_by is not None:
            for reason in SLOW_REASONS.values():
                yield (str(card.index), reason), reason in card.slowed_by


def _age(status: Status) -> Iterator[Sample]:
    if status.gpus is not None:
        yield (), status.gpus.age_s


GPU_METRICS: tuple[Metric, ...] = (
    Metric(
        "hisparsed_gpu_memory_used_bytes",
        "Memory of the GPU that is taken, by whomever.",
        of_gpus(lambda card: card.memory_used_bytes),
        ("gpu",),
    ),
    Metric(
        "hisparsed_gpu_memory_total_bytes",
        "Memory of the GPU.",
        of_gpus(lambda card: card.memory_total_bytes),
        ("gpu",),
    ),
    Metric(
        "hisparsed_gpu_utilization_ratio",
        "Share of the last moments in which a kernel ran.",
        of_gpus(lambda card: card.utilization),
        ("gpu",),
    ),
    Metric(
        "hisparsed_gpu_pcie_bytes_per_second",
        "PCIe traffic of the GPU, in (host to GPU) and out, over 20 ms.",
        _pcie,
        ("gpu", "direction"),
    ),
    Metric(
        "hisparsed_gpu_slowed",
        "1 while the GPU's clocks are held down for that reason.",
        _slowed,
        ("gpu", "reason"),
    ),
    Metric(
        "hisparsed_gpu_lost",
        "1 once the GPU has fallen off the bus or needs a reset.",
        of_gpus(lambda card: card.lost),
        ("gpu",),
    ),
    Metric(
        "hisparsed_gpu_reading_age_seconds",
        "Age of the figures of GPUs; it grows while NVML does not answer.",
        _age,
    ),
    Metric(
        "hisparsed_hot_sample_age_seconds",
        "Age of vLLM's own hot-buffer counters (vllm:hisparse_*), which move once in 2,000 steps; "
        "missing before the first.",
        seen(lambda o: None if o.hot.sampled is None else o.hot.sampled.age_s),
    ),
)
