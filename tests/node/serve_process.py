"""`hisparsed serve` in a separate process, as an operator starts it: documents, run, end.

For tests that need the real daemon. Knows nothing of how the daemon works inside. Also a service
manager's end of the notify protocol: a datagram socket and what came in on it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import psutil
import yaml

from hisparsed.control.api.client import ControlClient
from hisparsed.control.status.document import Status
from hisparsed.demo.node import free_port


class NotifySocket:
    """Collects messages as they come; the kernel keeps only a few unread ones."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.messages: list[dict[str, str]] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(b"", str(self.path))
        self._reader.join()
        self._socket.close()

    def having(self, name: str) -> list[str]:
        """The values of one variable, in order."""
        return [message[name] for message in list(self.messages) if name in message]

    def place(self, name: str) -> int:
        """Where among the messages the first with ``name`` stands; raises ``StopIteration``."""
        return next(place for place, one in enumerate(list(self.messages)) if name in one)

    def _read(self) -> None:
        while message := self._socket.recv(4096).decode():
            pairs = (line.partition("=") for line in message.splitlines())
            self.messages.append({name: value for name, _, value in pairs})


AS_ON_CUDA = (str(Path(__file__).with_name("serve_as_on_cuda.py")),)
"""A ``program`` that serves as on a platform where vLLM would fork."""
START_S = 180.0
STOP_S = 40.0
_POLL_S = 0.05
_LOG_LINES = 40


def until(what: str, condition: Callable[[], Any], *, timeout_s: float = 20.0) -> Any:
    """The first true value of ``condition``; fails the test after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(_POLL_S)
    raise AssertionError(f"{what}: not within {timeout_s:g} s")


def plain_environment() -> dict[str, str]:
    """This process's environment without what other tests set for vLLM inside them."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("VLLM_", "HISPARSED_"))
    }


def hisparsed(*arguments: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "hisparsed", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
        env=plain_environment(),
    )


def policy_document(**changes: Any) -> dict[str, Any]:
    """A policy with quick ticks under which nothing moves unasked."""
    return {
        "version": 1,
        "tick": "100ms",
        "stale_after": "20s",
        "pools": {"offload": {"floor": "5%", "ceiling": "50%", "start": "20%"}},
        "rebalance": {"strategy": "fixed", "cool_down": "1s", "cool_down_towards_safety": "0s"},
        "levers": {"multiplier": {"mode": "off"}},
        "canary": {"enabled": False},
        **changes,
    }


class NodeFiles:
    """The documents of one small reference node, everything of it under ``folder``."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.config_path = folder / "hisparsed.yaml"
        self.policy_path = folder / "policy.yaml"
        self.socket = folder / "control.sock"
        self.state_dir = folder / "state"
        self.port = free_port()
        self.document: dict[str, Any] = {
            "node": "reference",
            "host_budget": "24MiB",
            "reference": {"gpu_blocks": 600, "max_model_len": 2048},
            "api": {"host": "127.0.0.1", "port": self.port},
            "metrics": {"host": "127.0.0.1", "port": self.port},
            "control_socket": str(self.socket),
            "state_dir": str(self.state_dir),
            "policy": str(self.policy_path),
            "drain_timeout": "30s",
            "log": {"level": "info", "format": "json"},
            **changes,
        }
        self.write_policy(policy_document())
        self.write_config()

    def write_config(self) -> None:
        self.config_path.write_text(yaml.safe_dump(self.document), encoding="utf-8")

    def write_policy(self, document: dict[str, Any]) -> None:
        self.policy_path.write_text(yaml.safe_dump(document), encoding="utf-8")


def serve(files: NodeFiles) -> subprocess.CompletedProcess[str]:
    return hisparsed("serve", "--config", str(files.config_path))


def message_of(result: subprocess.CompletedProcess[str]) -> str:
    """The one message of a command that refused its input."""
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    lines = [line for line in result.stderr.splitlines() if not line.startswith("{")]
    assert lines, result.stderr
    assert lines[0].startswith("hisparsed: ")
    assert sum(line.startswith("hisparsed: ") for line in lines) == 1, result.stderr
    return "\n".join(lines)


def refusal(files: NodeFiles) -> str:
    """Why ``files`` are refused; the start must leave no socket and no process."""
    files.write_config()
    message = message_of(serve(files))
    assert not files.socket.exists()
    assert not _processes_naming(files.folder)
    return message


def _processes_naming(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and any(
                str(folder) in word for word in process.cmdline()
            ):
                found.append(process)
        except psutil.Error:
            continue
    return found


class ServeProcess:
    """One running daemon. ``end`` it, or ``kill`` what is left of it: both leave nothing."""

    def __init__(
        self,
        files: NodeFiles,
        *,
        program: Sequence[str] = ("-m", "hisparsed"),
        **environment: str,
    ) -> None:
        self.files = files
        self.url = f"http://127.0.0.1:{files.port}"
        self._log_path = files.folder / f"node-{time.monotonic_ns()}.log"
        with self._log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *program, "serve", "--config", str(files.config_path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=plain_environment() | environment,
            )
        self.http = httpx.Client(base_url=self.url, timeout=60.0)

    @property
    def pid(self) -> int:
        return self.process.pid

    def log(self) -> str:
        return self._log_path.read_text("utf-8", errors="replace")

    def log_end(self) -> str:
        return "\n".join(self.log().splitlines()[-_LOG_LINES:])

    def wait_until_ready(self) -> ServeProcess:
        """Until the node says on its control socket that it should get requests."""
        with self.control_http() as control:
            until("the node is ready", lambda: self._is_ready(control), timeout_s=START_S)
        return self

    def _is_ready(self, control: httpx.Client) -> bool:
        assert self.process.poll() is None, f"the node ended while starting:\n{self.log_end()}"
        try:
            # Asked first, because httpx leaves its socket open where no process listens.
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(str(self.files.socket))
            return control.get("/readyz").status_code == 200
        except (OSError, httpx.TransportError):
            return False

    def control_http(self) -> httpx.Client:
        """A plain client of the control API."""
        return httpx.Client(
            transport=httpx.HTTPTransport(uds=str(self.files.socket)),
            base_url="http://node",
            timeout=10.0,
        )

    def status(self) -> Status:
        with ControlClient(self.files.socket) as client:
            return client.status()

    def running(self) -> int:
        """Requests that the engine runs, as of its last report."""
        observed = self.status().observed
        assert observed is not None
        return observed.requests.running

    def engine(self) -> psutil.Process:
        """The engine-core process."""
        named = [one for one in self.children() if "EngineCore" in one.name()]
        assert len(named) == 1, f"expected one engine core, found {named}"
        return named[0]

    def children(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        """SIGTERM; the exit code. Fails when the daemon outstays its welcome."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def wait(self, timeout_s: float = STOP_S) -> int:
        """The exit code of a daemon that is about to end."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the daemon did not end:\n{self.log_end()}") from None

    def session_members(self) -> list[psutil.Process]:
        """Processes that still run of the session that the daemon began."""
        return [
            one for one in psutil.process_iter() if _session_of(one.pid) == self.pid and _runs(one)
        ]

    def assert_nothing_left(self) -> None:
        """Of an ended daemon: no process and no socket."""
        until("no process of the node is left", lambda: not self.session_members())
        assert not self.files.socket.exists()

    def kill(self) -> None:
        """Kill the daemon and all of its session; for clean-up, also of an ended one."""
        self.http.close()
        if self.process.poll() is None or self.session_members():
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait(STOP_S)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return None
