"""The GPUs of a node: those of a CUDA node, for as long as the daemon lives."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from hisparsed.control.watch import report_gpus
from hisparsed.engine.cuda.nvml import GpuReading
from hisparsed.node import node
from hisparsed.policy.events import EventKind


class OneGpu:
    """Stands for ``GpuReader``."""

    def __init__(self, nvml: Any, environ: Any) -> None:
        self.was_read = threading.Event()
        self.was_closed = False

    def read(self) -> tuple[GpuReading, ...]:
        self.was_read.set()
        return (GpuReading(0, name="H200", lost=True),)

    def close(self) -> None:
        self.was_closed = True


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[OneGpu]:
    readers: list[OneGpu] = []

    def make(nvml: Any, environ: Any) -> OneGpu:
        readers.append(OneGpu(nvml, environ))
        return readers[-1]

    monkeypatch.setattr(node, "GpuReader", make)
    return readers


def test_a_cuda_node_reads_its_gpus_and_lets_nvml_go(made: list[OneGpu]) -> None:
    watch = node.gpu_watch("cuda")
    assert watch is not None
    (reader,) = made
    watch.start()
    assert reader.was_read.wait(10)
    watch.stop()
    assert reader.was_closed
    seen = watch.status()
    assert seen is not None
    assert [card.lost for card in seen.cards] == [True]


def test_other_nodes_ask_no_driver(made: list[OneGpu]) -> None:
    assert node.gpu_watch("reference") is None
    assert made == []


class Told:
    """Stands for ``EventRecorder``; ``first`` is set by the first event."""

    def __init__(self) -> None:
        self.kinds: list[EventKind] = []
        self.first = asyncio.Event()

    def event(self, kind: EventKind, sentence: str) -> None:
        assert sentence
        self.kinds.append(kind)
        self.first.set()


async def test_a_lost_gpu_is_an_event_without_any_tick(made: list[OneGpu]) -> None:
    watch = node.gpu_watch("cuda")
    assert watch is not None
    watch.look()
    recorder: Any = Told()
    telling = asyncio.create_task(report_gpus(watch.status, recorder, every_s=0.01))
    await asyncio.wait_for(recorder.first.wait(), 10)
    telling.cancel()
    await asyncio.gather(telling, return_exceptions=True)
    assert recorder.kinds == [EventKind.GPU_LOST]
