"""The demo for real, short: two daemons, real vLLM; its end, and its end before the end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.engine, pytest.mark.long]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "hisparsed", "demo", *arguments]


def test_the_demo_ends_with_its_summary_and_loses_nothing(tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    done = subprocess.run(
        command("--for", "6s", "--json", "--report", str(report)),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["requests"] == document["policy_off"]["requests"] > 0
    assert document["failed"] == document["policy_off"]["failed"] == 0
    assert document["token_differences"] == 0
    assert document["compared"] == document["requests"]
    for key in ("pool_moves", "multiplier_changes", "prefix_hit_tokens", "seconds"):
        assert key in document
        assert key in document["policy_off"]
    assert document["policy_off"]["pool_moves"] == 0
    assert document["policy_off"]["multiplier_changes"] == 0
    assert "Traceback" not in done.stderr
    assert f"Report with plots: {report}" in done.stderr
    assert report.read_text().count("<polyline") > 8


@pytest.mark.parametrize(
    ("number", "line", "processes"),
    [
        (signal.SIGINT, "policy off: imports vLLM", 2),
        (signal.SIGINT, "Each node computes", 4),
        (signal.SIGTERM, "Both serve", 4),
    ],
)
def test_an_interrupted_demo_says_so_and_leaves_nothing(
    number: signal.Signals, line: str, processes: int
) -> None:
    with subprocess.Popen(
        command("--for", "60s"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # As in a terminal: what runs in the background of a shell ignores the interrupt.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    ) as demo:
        assert demo.stdout is not None
        said = ""
        while line not in said:
            said = demo.stdout.readline()
            assert said, "the demo ended before it was interrupted"
        begun = psutil.Process(demo.pid).children(recursive=True)
        demo.send_signal(number)
        rest = demo.stdout.read()
        assert demo.wait(60) == 130, rest
    assert "Interrupted: the demo has ended, and nothing of it runs on." in rest
    assert "Traceback" not in rest
    assert len(begun) >= processes
    _, alive = psutil.wait_procs(begun, timeout=30)
    assert not alive
