"""How a node ends: told to, while it starts, killed, or with its engine dead."""

from __future__ import annotations

import signal
from collections.abc import Callable

import httpx
import psutil
import pytest
from serve_process import NodeFiles, ServeProcess, until
from streaming import COMPLETIONS, call, complete, stream, usage_of

pytestmark = pytest.mark.engine

Start = Callable[[NodeFiles], ServeProcess]
EXIT_ENGINE_GONE = 70
LONG_ANSWER = 800
"""Tokens; some seconds of generation, which each test cuts short or waits for."""


def test_sigterm_lets_a_running_stream_finish_and_refuses_new_calls(
    files: NodeFiles, start: Start
) -> None:
    node = start(files).wait_until_ready()
    with stream(node.http, COMPLETIONS, call("drain", LONG_ANSWER)) as events:
        received = [next(events)]
        node.signal(signal.SIGTERM)
        until("the node drains", lambda: node.status().lifecycle == "draining")
        refused = node.http.post(COMPLETIONS, json=call("late", 4))
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "node_draining"
        with node.control_http() as control:
            assert control.get("/readyz").status_code == 503
        received += events
    assert usage_of(received)["completion_tokens"] == LONG_ANSWER
    assert node.wait() == 0, node.log_end()
    assert "Stopped; all calls ended." in node.log()
    assert "Traceback" not in node.log()
    node.assert_nothing_left()


def test_sigterm_while_the_engine_starts_leaves_nothing(files: NodeFiles, start: Start) -> None:
    node = start(files)
    until("the engine core starts", node.children, timeout_s=60)
    node.signal(signal.SIGTERM)
    assert node.wait(timeout_s=15) == 0, node.log_end()
    assert "Traceback" not in node.log()
    node.assert_nothing_left()


def test_a_killed_daemon_takes_its_engine_along_and_another_takes_over(
    files: NodeFiles, start: Start
) -> None:
    files.document["supervision"] = {"most_restarts": 0}
    files.write_config()
    first = start(files).wait_until_ready()
    engine = first.engine()
    with stream(first.http, COMPLETIONS, call("orphan", LONG_ANSWER)) as events:
        next(events)
        first.signal(signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            list(events)
    first.wait()
    until("the engine core ends by itself", lambda: not _alive(engine), timeout_s=20)
    assert files.socket.exists(), "a killed daemon cannot remove its socket"

    second = start(files).wait_until_ready()
    assert complete(second.http, "hello", 4)["usage"]["completion_tokens"] == 4
    assert second.status().node.pid == second.pid
    _kill_the_engine_under_a_stream(second)


def _kill_the_engine_under_a_stream(node: ServeProcess) -> None:
    with stream(node.http, COMPLETIONS, call("victim", LONG_ANSWER)) as events:
        received = [next(events)]
        node.engine().send_signal(signal.SIGKILL)
        try:
            received += events
        except httpx.TransportError as cut:
            received.append(f'"error": {cut}')
    assert any('"error"' in event for event in received), received[-2:]
    assert node.wait() == EXIT_ENGINE_GONE, node.log_end()
    assert "supervision.most_restarts 0" in node.log()
    node.assert_nothing_left()


def _alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
