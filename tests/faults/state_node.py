"""A control side whose state folder can be filled, locked and lost, and whose clocks can be set."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from control_node import POLICY, Node

from hisparsed.control.journal.store import FILE_NAME
from hisparsed.control.state_files import OverrideFile
from hisparsed.control.watch import StateWatch

ROOT = os.geteuid() == 0
_NOBODY = 65_534
_LIMIT_BYTES = 64


class StateNode(Node):
    """``flush`` writes the journal as its thread would, at a moment that the test chooses."""

    def __init__(self, folder: Path, state: Path, policy: str = POLICY) -> None:
        super().__init__(folder, policy, state)
        self.state = state
        self.source.restore(OverrideFile(state))
        watch = StateWatch(
            self.journal,
            self.recorder,
            {
                "targets.json": lambda: self.targets.error,
                "overrides.json": lambda: self.source.not_kept,
            },
        )
        self.not_kept = watch.not_kept
        self.on_tick.append(watch.watch)

    @property
    def journal_file(self) -> Path:
        return self.state / FILE_NAME

    def flush(self) -> None:
        records = []
        while not self.journal._queue.empty():
            records.append(self.journal._queue.get_nowait())
        self.journal._writer.write([record for record in records if record is not None])

    def close_journal(self) -> None:
        self.journal._writer.close()

    async def cycles(self, count: int) -> None:
        """Ticks, each of them written down."""
        for _ in range(count):
            await self.ticks(1)
            self.flush()

    def set_value(self, key: str, value: Any, for_s: float | None = None) -> None:
        self.operator.set_value(key, value, for_s=for_s, actor="ann")

    def kinds(self) -> list[str]:
        return [event.kind.value for event in reversed(self.journal.recent_events(200))]

    def sentences(self, kind: str) -> list[str]:
        found = self.journal.recent_events(200)
        return [event.sentence for event in reversed(found) if event.kind.value == kind]

    def metric(self, name: str) -> float:
        found = {
            sample.name: sample.value
            for family in self.metrics.collect()
            for sample in family.samples
        }
        return found[name]


class RealDisk:
    """A file system of one MiB in memory that holds ``folder``."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self.folder = place / "state"
        self._filler = place / "filler"

    def mount(self) -> bool:
        """Whether this machine lets us."""
        self._place.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(self._place)],  # noqa: S607
            check=False,
            capture_output=True,
        )
        if done.returncode == 0:
            self.folder.mkdir()
        return done.returncode == 0

    def unmount(self) -> None:
        self.writable()
        subprocess.run(["umount", "-l", str(self._place)], check=True)  # noqa: S607

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        with self._filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"x" * 4096)
        yield
        self._filler.unlink()

    def read_only(self) -> None:
        self._remount("ro")

    def writable(self) -> None:
        self._remount("rw")

    def _remount(self, mode: str) -> None:
        command = ["mount", "-o", f"remount,{mode}", str(self._place)]
        subprocess.run(command, check=True, capture_output=True)


class LimitedDisk:
    """Where nothing can be mounted: files may not grow beyond a little, which fails like it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (_LIMIT_BYTES, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def not_permitted(folder: Path) -> Iterator[None]:
    """``folder`` belongs to another user and is closed to all others."""
    if ROOT:
        os.seteuid(_NOBODY)
    mode = None if ROOT else folder.stat().st_mode
    if mode is not None:
        folder.chmod(0)
    try:
        yield
    finally:
        if ROOT:
            os.seteuid(0)
        if mode is not None:
            folder.chmod(mode)
