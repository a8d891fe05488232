"""What dead engines and daemons leave behind: finding it, and removing only what nobody holds.

Whether a file in /dev/shm is still mapped is asked of the kernel itself.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from hisparsed.daemon.held_files import is_held, remove_unheld

OFFLOAD_FILES = "vllm_offload_*"
"""vLLM's shared host memory, named after the engine."""


@dataclass(frozen=True, slots=True)
class ShmFile:
    path: Path
    size_bytes: int
    """Memory that it takes, which is less than its length where it has holes."""
    held: bool | None
    """Whether some process has it open or mapped; ``None`` where the kernel does not say."""


def offload_files(folder: Path) -> list[ShmFile]:
    """vLLM's files in ``folder``, which is /dev/shm."""
    found = []
    for path in sorted(folder.glob(OFFLOAD_FILES)):
        try:
            size_bytes = path.lstat().st_blocks * 512
            found.append(ShmFile(path, size_bytes, is_held(path)))
        except FileNotFoundError:
            continue  # its engine has just removed it
    return found


def sweep(file: ShmFile) -> bool:
    """Remove a file that nobody holds; says whether it is gone. Looks again right before."""
    return remove_unheld(file.path)


def remove_folder(folder: Path) -> bool:
    """Remove a runtime folder of a dead daemon; says whether it is gone."""
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()
