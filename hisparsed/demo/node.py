"""The demo's node: its sizes, its documents, and ``hisparsed serve`` in a separate process.

Sized so that a CPU shows what a GPU node does under load: more sessions than the pools can hold, a
slab smaller than the running requests, and the start split of the vLLM blog.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import httpx
import psutil
import yaml

from hisparsed.errors import UserError


@dataclass(frozen=True)
class DemoSettings:
    """Sizes of the demo's node; the others are the reference node's defaults."""

    max_num_seqs: int = 6
    max_model_len: int = 1056
    gpu_blocks: int = 420
    host_budget: str = "5568KiB"
    max_num_batched_tokens: int = 384
    layers: int = 8
    index_groups: int = 2
    index_topk: int = 64
    seed: int = 0


MODELS = {
    "standard": DemoSettings(),
    # A quarter of the work per token. Host memory holds as many tokens as with the standard model.
    "small": DemoSettings(
        gpu_blocks=240, host_budget="2784KiB", layers=4, index_groups=1, index_topk=32
    ),
}
START_REACH_TOKENS = 4176
"""Tokens that the HiSparse pool of either holds at the start: it has 75% of 348 blocks of 16."""


NODE_HEADER = "# Written by `hisparsed demo`.\n"


def node_document(settings: DemoSettings, folder: Path, port: int, policy: Path) -> str:
    """``hisparsed.yaml`` of a demo node that keeps everything under ``folder``."""
    return NODE_HEADER + yaml.safe_dump(
        {
            "node": "reference",
            "host_budget": settings.host_budget,
            "reference": {
                "layers": settings.layers,
                "index_groups": settings.index_groups,
                "index_topk": settings.index_topk,
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
            # The ageing bound follows the queue, and so the machine's speed.
            "admission": {"engage_at": "70%", "release_at": "50%", "ageing": "auto"},
            # Both nodes get only the compared calls.
            "canary": {"enabled": False},
        },
        sort_keys=False,
    )


_START_TIMEOUT_S = 240.0
_STOP_TIMEOUT_S = 40.0
LOOK_S = 0.2
"""Between two looks at a node that starts."""
_LOG_LINES = 15
_EXIT_NOISE = ("nanobind:", " - leaked", " - ... skipped", "See https://nanobind")


def free_port() -> int:
    """A TCP port of loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class DemoNode:
    """One daemon under ``folder``; ``mode`` is the policy's.

    As a context manager it serves when the block begins, and has ended after it.
    """

    def __init__(self, settings: DemoSettings, folder: Path, mode: str) -> None:
        folder.mkdir(parents=True)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.socket = folder / "control.sock"
        policy = folder / "policy.yaml"
        policy.write_text(policy_document(mode), encoding="utf-8")
        self._folder = folder
        self._config = folder / "hisparsed.yaml"
        self._config.write_text(
            node_document(settings, folder, self.port, policy), encoding="utf-8"
        )
        self._log_path = folder / "node.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._gives_up_at = 0.0

    def begin(self) -> None:
        """Start the process; ``is_serving`` reports when it serves."""
        self._gives_up_at = time.monotonic() + _START_TIMEOUT_S
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 (our own interpreter and files)
                [sys.executable, "-m", "hisparsed", "serve", "--config", str(self._config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Files that a killed node leaves are removed with the folder.
                env={**os.environ, "TMPDIR": str(self._folder)},
                # Ctrl-C of a terminal is for this process, which ends the node itself.
                start_new_session=True,
            )

    def is_serving(self) -> bool:
        """Whether it serves yet. Raises ``UserError`` if it has ended or takes too long."""
        self.require_alive()
        try:
            if httpx.get(f"{self.url}/health", timeout=2.0).status_code == httpx.codes.OK:
                return True
        except httpx.TransportError:
            pass
        if time.monotonic() > self._gives_up_at:
            raise UserError(
                f"the demo's node did not serve within {_START_TIMEOUT_S:g} s:\n{self._log_end()}"
            )
        return False

    def stage(self) -> str:
        """The current stage of a node that starts, in a few words."""
        with contextlib.suppress(psutil.Error):
            if self._process is not None and psutil.Process(self._process.pid).children():
                return "its engine process imports vLLM and starts"
        return "imports vLLM"

    def require_alive(self) -> None:
        """Raise ``UserError`` with the end of its log when the node has ended."""
        code = self._process.poll() if self._process is not None else None
        if code is not None:
            raise UserError(f"the demo's node ended with exit code {code}:\n{self._log_end()}")

    def ask_to_stop(self) -> None:
        """Send SIGTERM; ``wait_for_end`` does the rest."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def wait_for_end(self, within_s: float) -> None:
        """Wait for the end of the process; it and its engine are killed after ``within_s``."""
        if self._process is None:
            return
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End it and its engine at once."""
        process = self._process
        if process is not None and process.poll() is None:
            # The group holds the engine core too; none of it may outlive the demo.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def __enter__(self) -> DemoNode:
        self.begin()
        try:
            while not self.is_serving():
                time.sleep(LOOK_S)
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

    def _stop(self) -> None:
        end_nodes((self,), _STOP_TIMEOUT_S)

    def _log_end(self) -> str:
        text = self._log_path.read_text("utf-8", errors="replace")
        # Extension modules of vLLM report leaks at exit; they hide the error.
        lines = [line for line in text.splitlines() if not line.startswith(_EXIT_NOISE)]
        handle, kept = tempfile.mkstemp(prefix="hisparsed-demo-node-", suffix=".log")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write("\n".join(lines))
        end = "\n".join(f"  | {line}" for line in lines[-_LOG_LINES:])
        return f"{end}\nThe whole log is in {kept}."


def end_nodes(nodes: Sequence[DemoNode], within_s: float) -> None:
    """End them together. An interrupt of the wait kills them at once."""
    try:
        for node in nodes:
            node.ask_to_stop()
        for node in nodes:
            node.wait_for_end(within_s)
    except BaseException:
        for node in nodes:
            node.kill()
        raise
