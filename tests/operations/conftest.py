"""A sound CUDA machine and a node that fits it; tests break one thing at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hisparsed.config.node import NodeConfig
from hisparsed.operations.checks import Examination
from hisparsed.operations.known_faults import KnownFaults
from hisparsed.operations.machine import Gpu, Machine

GIB = 2**30
NO_FAULTS = KnownFaults(vllm=(), kernel=(), driver=())

SOUND = Machine(
    memory_bytes=2048 * GIB,
    available_bytes=2000 * GIB,
    shm_total_bytes=1900 * GIB,
    shm_free_bytes=1900 * GIB,
    shared_files=(),
    memlock_bytes=None,
    kernel="6.8.0-124-generic",
    driver="580.159.03",
    gpus=(Gpu("NVIDIA H200", 141 * GIB, 0, 0),) * 8,
    numa_free_bytes=(1000 * GIB, 1000 * GIB),
    huge_pages="madvise",
    clock_kept=True,
    unix_s=1_000_000.0,
    disk_free_bytes=100 * GIB,
    taken_ports=(),
    daemon_answers=False,
    state_trouble=None,
    dead_folder=None,
    vllm="0.33.0",
)

Ask = Callable[..., Examination]


@pytest.fixture
def ask() -> Ask:
    """``ask(machine={...}, kind="cuda", faults=..., **config)`` changes one thing or two."""

    def question(
        machine: dict[str, Any] | None = None,
        kind: Any = "cuda",
        faults: KnownFaults = NO_FAULTS,
        **config: Any,
    ) -> Examination:
        document = {
            "node": "cuda",
            "model": "glm",
            "host_budget": "1536GiB",
            "cuda": {"tensor_parallel_size": 8},
            "disaggregation": None,
        }
        return Examination(
            config=NodeConfig.model_validate(document | config),
            document=Path("/etc/hisparsed/hisparsed.yaml"),
            document_unix_s=999_000.0,
            kind=kind,
            machine=replace(SOUND, **(machine or {})),
            faults=faults,
        )

    return question
