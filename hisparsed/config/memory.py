"""How much memory this machine lets the node use: its RAM, or less where a cgroup says so."""

from pathlib import Path

import psutil

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


def machine_memory_bytes() -> int:
    """RAM in bytes, or the cgroup's limit where that is lower."""
    limit = cgroup_limit_bytes(_CGROUP_ROOT, _OWN_CGROUP)
    total = psutil.virtual_memory().total
    return total if limit is None else min(total, limit)


def cgroup_limit_bytes(root: Path, own: Path) -> int | None:
    """The lowest memory limit (v2, else v1) from this process's cgroup up; ``None`` for none.

    ``root`` is where cgroups are mounted, ``own`` the process's list of its cgroups.
    """
    try:
        entries = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return None
    limits = []
    for _number, controllers, place in entries:
        if not controllers:
            base, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        folder = base / place.lstrip("/")
        for candidate in (folder, *folder.parents):
            limits += _read_limit(candidate / name)
            if candidate == base:
                break
    return min(limits, default=None)


def _read_limit(path: Path) -> list[int]:
    try:
        text = path.read_text().strip()
    except OSError:
        return []
    return [int(text)] if text.isdigit() else []  # "max" is no limit
