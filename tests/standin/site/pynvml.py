"""NVML for tests: cards that are not there. Only what hisparsed and vLLM ask of it."""
# ruff: noqa: N802 (NVML's names)

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

NVML_ERROR_NOT_SUPPORTED = 3
NVML_ERROR_GPU_IS_LOST = 15
NVML_ERROR_RESET_REQUIRED = 16


class NVMLError(Exception):
    """These cards answer only what is below."""

    value = NVML_ERROR_NOT_SUPPORTED


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name.startswith("NVML"):
        return 0

    def unknown(*args: Any) -> Any:
        raise NVMLError(name)

    return unknown


def nvmlInit() -> None:
    """There is no driver to open."""


def nvmlShutdown() -> None:
    """Nor to close."""


def nvmlSystemGetDriverVersion() -> str:
    return "580.00"


def nvmlDeviceGetCount() -> int:
    return int(os.environ.get("STANDIN_GPUS", "8"))


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    return index


def nvmlDeviceGetName(handle: int) -> str:
    return "NVIDIA H200"


def nvmlDeviceGetUUID(handle: int) -> str:
    return f"GPU-{handle}"


def nvmlDeviceGetCudaComputeCapability(handle: int) -> tuple[int, int]:
    return 9, 0


def nvmlDeviceGetMemoryInfo(handle: int) -> Any:
    total = int(os.environ.get("STANDIN_GPU_BYTES", str(2**30)))
    return SimpleNamespace(total=total, used=total // 8, free=total - total // 8)
