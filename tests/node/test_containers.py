"""Starts that fail in a container, and signals to process 1.

One that serves in a container is in test_client_answers.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from engine_faults import NO_START, Faults
from serve_process import START_S, NodeFiles, ServeProcess, hisparsed, plain_environment

from hisparsed.operations.checks import EXIT_FATAL

pytestmark = pytest.mark.timeout(600)


def doctor(files: NodeFiles, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hisparsed", "doctor", "--config", str(files.config_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=plain_environment() | environment,
    )


def both_refuse(files: NodeFiles, words: str, **environment: str) -> None:
    """`serve` and `doctor`, in the same words."""
    files.write_config()
    serve = ServeProcess(files, **environment)
    try:
        assert serve.wait() == 2, serve.log_end()
        assert words in serve.log().replace("\n", " ")
        assert "Traceback" not in serve.log()
    finally:
        serve.kill()
    found = doctor(files, **environment)
    assert found.returncode == EXIT_FATAL, found.stdout
    assert words.split("; ", maxsplit=1)[0] in " ".join(found.stdout.split())


def test_a_slab_too_small_for_one_request_is_refused_by_both(files: NodeFiles) -> None:
    files.document["reference"]["gpu_blocks"] = 10
    both_refuse(files, "reference.gpu_blocks: 10 cannot admit one request")


def test_a_socket_path_too_long_is_refused_by_both(files: NodeFiles) -> None:
    files.document["control_socket"] = str(files.folder / ("s" * 110))
    both_refuse(files, "than the 107 bytes that a Unix socket may have")


def test_a_port_of_vllms_that_is_none_is_refused_by_both(files: NodeFiles) -> None:
    both_refuse(files, 'VLLM_PORT: "http" is not a port; unset it', VLLM_PORT="http")


@pytest.mark.long
@pytest.mark.engine
def test_a_variable_that_vllm_cannot_read_is_named_before_an_engine_starts(
    files: NodeFiles,
) -> None:
    serve = ServeProcess(files, VLLM_ENGINE_READY_TIMEOUT_S="soon")
    try:
        assert serve.wait(START_S) == 2, serve.log_end()
        assert (
            serve.log()
            .splitlines()[-1]
            .startswith('hisparsed: VLLM_ENGINE_READY_TIMEOUT_S: vLLM cannot read "soon"')
        )
        serve.assert_nothing_left()
    finally:
        serve.kill()


@pytest.mark.engine
@pytest.mark.long
def test_the_last_line_of_a_failed_start_says_why_and_where_more_is(
    files: NodeFiles, tmp_path: Path
) -> None:
    faults = Faults(tmp_path / "faults")
    faults.begin(NO_START)
    files.document["supervision"] = {"most_restarts": 0}
    files.write_config()
    serve = ServeProcess(files, **faults.environment)
    try:
        assert serve.wait(START_S) == 70, serve.log_end()
        last = serve.log().splitlines()[-1]
        assert last.startswith(
            "hisparsed: the engine did not start: RuntimeError: a test wants no engine to start"
        )
        assert Path(last.partition("; evidence: ")[2]).is_file()
        serve.assert_nothing_left()
    finally:
        serve.kill()


# --- as process 1 -------------------------------------------------------------------


@pytest.mark.skipif(
    shutil.which("unshare") is None or os.geteuid() != 0, reason="needs a name space of its own"
)
@pytest.mark.parametrize("after_s", [0.4, pytest.param(1.5, marks=pytest.mark.long)])
def test_a_signal_that_comes_early_is_not_lost_on_process_1(
    files: NodeFiles, after_s: float
) -> None:
    with tempfile.TemporaryFile() as log:
        words = [str(shutil.which("unshare")), "--pid", "--fork", "--kill-child", sys.executable]
        outside = subprocess.Popen(
            [*words, "-m", "hisparsed", "serve", "--config", str(files.config_path)],
            stdout=log,
            stderr=log,
            env=plain_environment(),
            start_new_session=True,
        )
        try:
            time.sleep(after_s)
            (inside,) = children_of(outside.pid)
            os.kill(inside, signal.SIGTERM)
            assert outside.wait(30) == 0
        finally:
            outside.kill()
            outside.wait()
        log.seek(0)
        assert b"Traceback" not in log.read()
    assert not files.socket.exists()


def children_of(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return [int(one) for one in text.split()]


def test_the_policy_may_lie_in_a_folder_whose_name_is_no_text(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/no\xfftext"))
    folder.mkdir()
    policy = folder / "policy.yaml"
    policy.write_text("version: 1\ntick: 1e300\n", encoding="utf-8")
    result = hisparsed("policy", "check", "--offline", str(policy))
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert "out of range" in result.stderr
