"""The demo's node: its sizes, its documents, and ``hisparsed serve`` in a process of its own.

Sized so that a CPU shows what a GPU node does under load: more sessions than the pools can hold, a
slab smaller than the running requests, and a start split as the vLLM blog has it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import TracebackType

import httpx
import yaml

from hisparsed.errors import UserError


@dataclass(frozen=True)
class DemoSettings:
    """One demo run. Token counts of the trace are multiplied by ``scale``."""

    scale: Fraction = Fraction(1, 16)
    concurrency: int = 24
    max_num_seqs: int = 8
    max_model_len: int = 4224
    gpu_blocks: int = 1500
    host_budget: str = "44MiB"
    max_num_batched_tokens: int = 384
    seed: int = 0


NODE_HEADER = "# Written by `hisparsed demo`.\n"


def node_document(settings: DemoSettings, folder: Path, port: int, policy: Path) -> str:
    """``hisparsed.yaml`` of a demo node that keeps everything under ``folder``."""
    return NODE_HEADER + yaml.safe_dump(
        {
            "node": "reference",
            "host_budget": settings.host_budget,
            "reference": {
                "gpu_blocks": settings.gpu_blocks,
                "max_model_len": settings.max_model_len,
                "max_num_seqs": settings.max_num_seqs,
                "max_num_batched_tokens": settings.max_num_batched_tokens,
                "seed": settings.seed,
            },
            "api": {"host": "127.0.0.1", "port": port},
            "metrics": {"host": "127.0.0.1", "port": port},
            "control_socket": str(folder / "control.sock"),
            "state_dir": str(folder / "state"),
            "policy": str(policy),
            "drain_timeout": "10s",
            "log": {"level": "warning", "format": "json"},
        },
        sort_keys=False,
    )


def policy_document(mode: str) -> str:
    """``policy.yaml`` with the demo's short windows; ``mode`` is ``act`` or ``off``."""
    return NODE_HEADER + yaml.safe_dump(
        {
            "version": 1,
            "mode": mode,
            "tick": "500ms",
            "stale_after": "10s",
            "pools": {"offload": {"floor": "3%", "ceiling": "50%", "start": "25%"}},
            "rebalance": {
                "margin": "20%",
                "window": "3s",
                "dead_band": {"relative": "5%", "absolute": "1%"},
                "step": "2%",
                "step_towards_safety": "6%",
                "cool_down": "2s",
                "cool_down_towards_safety": "1s",
                "hold_off": "10s",
            },
            "hot": {
                "min": 1.0,
                "max": 4.0,
                "start": 4.0,
                "step": 1.0,
                "free_low": "10%",
                "free_high": "40%",
                "window_shrink": "2s",
                "window_grow": "8s",
                "pcie_budget": "1GiB",
            },
            "admission": {"engage_at": "70%", "release_at": "50%", "ageing": "25s"},
            # The two runs that are compared get the same calls and nothing else.
            "canary": {"enabled": False},
        },
        sort_keys=False,
    )


_START_TIMEOUT_S = 240.0
_STOP_TIMEOUT_S = 40.0
_LOG_LINES = 15
_EXIT_NOISE = ("nanobind:", " - leaked", " - ... skipped", "See https://nanobind")


def free_port() -> int:
    """A TCP port of loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class DemoNode:
    """Context manager around one daemon under ``folder``; ``mode`` is the policy's."""

    def __init__(self, settings: DemoSettings, folder: Path, mode: str) -> None:
        folder.mkdir(parents=True)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.socket = folder / "control.sock"
        policy = folder / "policy.yaml"
        policy.write_text(policy_document(mode), encoding="utf-8")
        self._config = folder / "hisparsed.yaml"
        self._config.write_text(
            node_document(settings, folder, self.port, policy), encoding="utf-8"
        )
        self._log_path = folder / "node.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> DemoNode:
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 (our own interpreter and files)
                [sys.executable, "-m", "hisparsed", "serve", "--config", str(self._config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def require_alive(self) -> None:
        """Raise ``UserError`` with the end of its log when the node has ended."""
        code = self._process.poll() if self._process is not None else None
        if code is not None:
            raise UserError(f"the demo's node ended with exit code {code}:\n{self._log_end()}")

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            self.require_alive()
            try:
                if httpx.get(f"{self.url}/health", timeout=2.0).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        raise UserError(
            f"the demo's node did not serve within {_START_TIMEOUT_S:g} s:\n{self._log_end()}"
        )

    def _stop(self) -> None:
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            # The session holds the engine core too; none of it may outlive the demo.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _log_end(self) -> str:
        text = self._log_path.read_text("utf-8", errors="replace")
        # Extension modules of vLLM report leaks at exit; they bury what matters.
        lines = [line for line in text.splitlines() if not line.startswith(_EXIT_NOISE)]
        handle, kept = tempfile.mkstemp(prefix="hisparsed-demo-node-", suffix=".log")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write("\n".join(lines))
        end = "\n".join(f"  | {line}" for line in lines[-_LOG_LINES:])
        return f"{end}\nThe whole log is in {kept}."
