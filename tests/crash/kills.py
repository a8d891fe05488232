"""Random kills of one node after another: which process, in which phase, at which moment.

Each is followed by the next start, or by `doctor --fix`; after either nothing of the node before
may be left: no process, no socket, no folder, no shared memory.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "node"))

from serve_process import NodeFiles, ServeProcess, hisparsed, until
from streaming import COMPLETIONS, call

from hisparsed.control.api.socket import is_live
from hisparsed.node.engine.processes import orphans
from hisparsed.node.engine.shared_memory import is_held
from hisparsed.operations.checks import EXIT_FATAL

PHASES = ("start", "serve", "restart", "stop")
VICTIMS = ("daemon", "engine", "both", "stopped engine")
"""The last: the engine gets SIGSTOP, then the daemon is killed, so that the engine cannot end."""
LONGEST_S = {"serve": 1.5, "stop": 2.0}
START_S = 12.0
"""Until a start was measured: on a busy machine one takes several times as long."""
RESTART = 0.8
"""A restart's time as a share of a start's."""
_SHM = Path("/dev/shm")  # noqa: S108 (the kernel's)
_CACHES = "torchinductor"
_GONE_S = 120.0


class Crashes:
    """``folder`` is for the node's files and its temporary ones; its name must be short."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self._rng = rng
        self._temporary = folder / "t"
        self._temporary.mkdir()
        self.files = NodeFiles(
            folder / "n", supervision={"first_wait": "50ms"}, drain_timeout="500ms"
        )
        self._nodes: list[ServeProcess] = []
        self._start_s = START_S

    def kill(self) -> str:
        """One kill; what it was, in words. Raises ``AssertionError`` for what is left."""
        phase, victim = self._rng.choice(PHASES), self._rng.choice(VICTIMS)
        longest_s = {"start": self._start_s, "restart": RESTART * self._start_s, **LONGEST_S}
        after_s = self._rng.random() * longest_s[phase]
        said = f"{victim} killed {after_s:.2f}s into {phase}"
        before = set(_SHM.iterdir())
        node = ServeProcess(self.files, TMPDIR=str(self._temporary))
        self._nodes.append(node)
        try:
            with self._in_phase(node, phase):
                time.sleep(after_s)
                self._strike(node, victim)
            self._ended(node)
            self._swept(node, before)
        except AssertionError as error:
            raise AssertionError(f"{said}: {error}\n{node.log_end()}") from error
        finally:
            node.kill()
            self._nodes.remove(node)
        return said

    @contextmanager
    def _in_phase(self, node: ServeProcess, phase: str) -> Iterator[None]:
        if phase == "start":
            yield
            return
        began_s = time.monotonic()
        node.wait_until_ready()
        self._start_s = time.monotonic() - began_s
        with self._open_call(node):
            if phase == "restart":
                with node.control_http() as control:
                    control.post("/v1/engine/restart", json={"actor": "test", "drain_s": 0})
            elif phase == "stop":
                node.signal(signal.SIGTERM)
            yield

    @contextmanager
    def _open_call(self, node: ServeProcess) -> Iterator[None]:
        body = {**call("crash", 400), "stream": True}
        asked = node.http.build_request("POST", COMPLETIONS, json=body)
        response = node.http.send(asked, stream=True)
        try:
            next(response.iter_raw(), None)
            yield
        finally:
            with contextlib.suppress(httpx.HTTPError):
                response.close()

    def _strike(self, node: ServeProcess, victim: str) -> None:
        engines = [one for one in node.children() if "EngineCore" in _name(one)]
        for engine in engines if victim != "daemon" else ():
            number = signal.SIGSTOP if victim == "stopped engine" else signal.SIGKILL
            with contextlib.suppress(psutil.Error):
                engine.send_signal(number)
        if victim != "engine":
            with contextlib.suppress(ProcessLookupError):
                node.signal(signal.SIGKILL)

    def _ended(self, node: ServeProcess) -> None:
        """Wait until the node has ended, the daemon first; ask it if it still runs."""
        if node.process.poll() is None:
            node.signal(signal.SIGTERM)
        node.wait(_GONE_S)
        # The next start ends what cannot end alone.
        until(
            "what can run has ended with its daemon",
            lambda: _all_wait(node.session_members()),
            timeout_s=_GONE_S,
        )

    def _swept(self, node: ServeProcess, before: set[Path]) -> None:
        """By `doctor --fix` or by the next start, which ends at once."""
        if self._rng.random() < 0.5:
            words = ("doctor", "--config", str(self.files.config_path), "--fix")
            found = hisparsed(*words, timeout_s=_GONE_S)
            assert found.returncode != EXIT_FATAL, found.stdout
        else:
            after = ServeProcess(self.files, TMPDIR=str(self._temporary))
            self._nodes.append(after)
            until("it has begun", lambda: is_live(self.files.socket), timeout_s=_GONE_S)
            after.signal(signal.SIGTERM)
            assert after.wait(_GONE_S) == 0, after.log_end()
            after.kill()
            self._nodes.remove(after)
        until("no process is left", lambda: not node.session_members())
        assert not [one.pid for one in orphans(self.files.state_dir)], "a process is left"
        assert not self.files.socket.exists(), "the control socket is left"
        left = [one.name for one in self._temporary.iterdir() if _CACHES not in one.name]
        assert not left, f"temporary files are left: {left}"
        assert not (self.files.state_dir / "runtime-folder").exists()
        new = {one for one in _SHM.iterdir() if one not in before and _is_ours(one)}
        assert not new, f"shared memory is left: {sorted(new)}"

    def close(self) -> None:
        """For a run that failed."""
        for node in self._nodes:
            node.kill()
        for one in orphans(self.files.state_dir):
            with contextlib.suppress(psutil.Error):
                one.kill()


def _is_ours(path: Path) -> bool:
    """Others use the folder meanwhile: files that another process holds, or that another user made,
    must stay."""
    try:
        return path.stat().st_uid == os.geteuid() and is_held(path) is False
    except FileNotFoundError:
        return False


def _all_wait(processes: Sequence[psutil.Process]) -> bool:
    """For a signal, or for one that does: multiprocessing's tracker ends with the last of those
    that it was begun for. An engine that is stopped before it left the group of its daemon is not
    woken by the kernel when that ends."""
    stopped = [one for one in processes if _status(one) in (psutil.STATUS_STOPPED, None)]
    others = [one for one in processes if one not in stopped]
    return not others or (bool(stopped) and all(map(_is_tracker, others)))


def _status(process: psutil.Process) -> str | None:
    """``None`` where it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return str(process.status())
    return None


def _is_tracker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any("resource_tracker" in word for word in process.cmdline())
    return True


def _name(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return process.name()
    return ""
