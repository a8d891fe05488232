"""Where a demo's figures come from: the machine, the versions and the model, in words."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from hisparsed import __version__
from hisparsed.config.machine import machine_memory_bytes
from hisparsed.demo.node import DemoSettings
from hisparsed.engine.compat.versions import installed_vllm

_CPU_INFO = Path("/proc/cpuinfo")
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True)
class Origin:
    """Lines of the report, for people."""

    machine: str
    software: str
    model: str


def origin_of(model: str, settings: DemoSettings) -> Origin:
    """Reads this machine. ``model`` is the name of ``settings``."""
    return Origin(
        machine=(
            f"{platform.node()}: {cpus_text(len(os.sched_getaffinity(0)), _text(_CPU_QUOTA))}, "
            f"{cpu_name(_text(_CPU_INFO)) or platform.machine()}, "
            f"{machine_memory_bytes() / (1 << 30):.0f} GiB of memory"
        ),
        software=(
            f"hisparsed {__version__}, vLLM {installed_vllm() or 'not found'}, "
            f"Python {platform.python_version()}, {platform.system()} {platform.release()}"
        ),
        model=(
            f"{model}: {settings.layers} layers, top-{settings.index_topk} sparse attention, "
            f"random weights, seed {settings.seed}; computed on the CPU"
        ),
    )


def cpus_text(count: int, cpu_max: str) -> str:
    """Such as "2 CPUs", or "0.8 of 2 CPUs" where the cgroup's ``cpu.max`` allows less."""
    quota, _, period = cpu_max.partition(" ")
    words = f"{count} CPU{'' if count == 1 else 's'}"
    if not (quota.isdigit() and period.isdigit()):
        return words
    allowed = int(quota) / int(period)
    return words if allowed >= count else f"{allowed:.2g} of {words}"


def cpu_name(cpu_info: str) -> str:
    """The first CPU's name in ``/proc/cpuinfo``; empty where the kernel gives none."""
    for line in cpu_info.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
