"""The whole daemon on this GPU: start it, let its canary ask, end it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from gpu_engine import PROFILE
from gpu_suite import Figures

_ASK_EVERY_S = 2.0
_NO_DAEMON = 2


def serve_and_ask(within_s: float) -> Figures:
    """Seconds to the first answer and the canary's verdict. Raises ``AssertionError``."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        document = write_document(folder)
        began_s = time.monotonic()
        daemon = subprocess.Popen(
            [sys.executable, "-m", "hisparsed", "serve", "--config", str(document)]
        )
        try:
            answer = _canary(daemon, folder / "control.sock", began_s + within_s)
            took_s = time.monotonic() - began_s
        finally:
            daemon.send_signal(signal.SIGTERM)
            code = daemon.wait(60)
    if answer["state"] != "ok":
        raise AssertionError(f"the canary says {answer}")
    if code:
        raise AssertionError(f"the daemon ended with {code}")
    return {"start_and_canary_s": round(took_s, 1), "canary": answer["state"]}


def write_document(folder: Path) -> Path:
    """The shipped profile with its files and port elsewhere."""
    document: dict[str, Any] = yaml.safe_load(PROFILE.read_text())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    document |= {
        "api": {"host": "127.0.0.1", "port": port},
        "policy": str(PROFILE.parents[1] / "policy.yaml"),
        "control_socket": str(folder / "control.sock"),
        "state_dir": str(folder / "state"),
    }
    path = folder / "node.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def _canary(daemon: subprocess.Popen[bytes], control: Path, until_s: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "hisparsed", "canary", "--now", "--json"]
    environ = {**os.environ, "COLUMNS": "200"}
    while time.monotonic() < until_s:
        if daemon.poll() is not None:
            raise AssertionError(f"the daemon ended with {daemon.returncode} before it served")
        asked = subprocess.run(
            [*command, "--socket", str(control)],
            check=False,
            capture_output=True,
            text=True,
            env=environ,
        )
        if asked.returncode != _NO_DAEMON:
            answer: dict[str, Any] = json.loads(asked.stdout)
            return answer
        time.sleep(_ASK_EVERY_S)
    raise AssertionError(f"no daemon answered in time; last: {asked.stderr.strip()}")
