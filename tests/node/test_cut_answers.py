"""The answer for every kind of client when a node or its engine ends during its call.

Within the drain a call ends whole; else in the error form of its API. Never does an answer that was
cut off look finished.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest
from open_calls import ENVIRONMENT, ERROR, GONE, KINDS, WHOLE, OpenCalls
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from serve_process import START_S, NodeFiles, ServeProcess, until

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]

ROOM = {
    "reference": {"gpu_blocks": 2400, "max_model_len": 1024, "max_num_seqs": 16},
    "host_budget": "48MiB",
}


def to_daemon(node: ServeProcess) -> None:
    node.signal(signal.SIGTERM)


def to_daemon_twice(node: ServeProcess) -> None:
    node.signal(signal.SIGTERM)
    until("the node drains", lambda: node.status().lifecycle == "draining")
    node.signal(signal.SIGTERM)


def to_group(number: signal.Signals) -> Callable[[ServeProcess], None]:
    return lambda node: os.killpg(node.pid, number)


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        (to_group(signal.SIGTERM), WHOLE),
        (to_group(signal.SIGINT), WHOLE),
        (to_daemon_twice, ERROR),
    ],
    ids=["SIGTERM to the group", "SIGINT to the group", "second SIGTERM"],
)
def test_a_daemon_that_ends_leaves_no_answer_that_looks_finished(
    files: NodeFiles,
    end: Callable[[ServeProcess], None],
    outcome: str,
) -> None:
    files.document |= ROOM
    files.write_config()
    node = ServeProcess(files, **ENVIRONMENT)
    try:
        ends_as(node.wait_until_ready(), end, outcome)
    finally:
        node.kill()


def ends_as(node: ServeProcess, end: Callable[[ServeProcess], None], outcome: str) -> None:
    """Calls of every kind have this ``outcome`` when ``end`` ends the daemon; nothing is left."""
    calls = OpenCalls(node).begin()
    assert open_requests(node) == len(KINDS)
    end(node)
    found = calls.outcomes()
    assert node.wait() == 0, node.log_end()
    # Nobody answers for it once the daemon is gone; what it said until then was "in progress".
    background = found.pop("responses background")
    assert background in (outcome, GONE), background
    assert found == dict.fromkeys(found, outcome), node.log_end()
    if outcome == ERROR:
        assert f"ut off {len(KINDS)} calls" in node.log()
    else:
        assert "Stopped; all calls ended." in node.log()
    node.assert_nothing_left()


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """A daemon whose engines come and go."""
    files = NodeFiles(
        tmp_path_factory.mktemp("lasting"),
        **ROOM,
        supervision={"most_restarts": 20, "first_wait": "50ms", "hang_after": "3s"},
        drain_timeout="500ms",
    )
    node = ServeProcess(files, **ENVIRONMENT)
    try:
        yield node.wait_until_ready()
    finally:
        node.kill()


def to_engine(number: signal.Signals) -> Callable[[ServeProcess], None]:
    return lambda node: node.engine().send_signal(number)


def restart(drain_s: float) -> Callable[[ServeProcess], None]:
    def planned(node: ServeProcess) -> None:
        with node.control_http() as control:
            body = {"actor": "test", "drain_s": drain_s}
            assert control.post("/v1/engine/restart", json=body).json()["begun"]

    return planned


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        (restart(60), WHOLE),
        (restart(0), ERROR),
        (to_engine(signal.SIGTERM), ERROR),
        (to_engine(signal.SIGINT), ERROR),
        (to_engine(signal.SIGKILL), ERROR),
        (to_engine(signal.SIGSTOP), ERROR),
    ],
    ids=["restart", "restart at once", "SIGTERM", "SIGINT", "SIGKILL", "hang"],
)
def test_an_engine_that_ends_leaves_no_answer_that_looks_finished(
    lasting: ServeProcess, end: Callable[[ServeProcess], None], outcome: str
) -> None:
    node, restarts, before = lasting, restarts_of(lasting), ended(lasting)
    calls = OpenCalls(node).begin()
    end(node)
    found = calls.outcomes()
    assert found == dict.fromkeys(KINDS, outcome), node.log_end()
    until(
        "another engine serves",
        lambda: restarts_of(node) > restarts and node.status().lifecycle == "serving",
        timeout_s=START_S,
    )
    now = ended(node)
    assert now["cut"] - before["cut"] == (len(KINDS) if outcome == ERROR else 0)
    assert now["cancelled"] == before["cancelled"]
    assert now["failed"] == before["failed"]


def test_a_client_that_goes_away_is_counted_as_such(lasting: ServeProcess) -> None:
    before = ended(lasting)
    with lasting.http.stream(
        "POST",
        "/v1/completions",
        json={"prompt": "left", "max_tokens": 500, "ignore_eos": True, "stream": True},
    ) as response:
        next(response.iter_lines())
    until("it is counted", lambda: ended(lasting)["cancelled"] == before["cancelled"] + 1)
    assert ended(lasting)["cut"] == before["cut"]


def test_a_drain_that_is_over_leaves_no_answer_that_looks_finished(lasting: ServeProcess) -> None:
    """The last one on this daemon, which it ends."""
    ends_as(lasting, to_daemon, ERROR)


def restarts_of(node: ServeProcess) -> int:
    life = node.status().engine
    assert life is not None
    return life.restarts_total


def ended(node: ServeProcess) -> dict[str, float]:
    """Calls by how they ended."""
    found = samples(node, "hisparsed_ended_requests_total")
    return {one.labels["how"]: one.value for one in found}


def open_requests(node: ServeProcess) -> float:
    (found,) = samples(node, "hisparsed_open_requests")
    return found.value


def samples(node: ServeProcess, name: str) -> list[Sample]:
    page = node.http.get("/metrics").text
    families = text_string_to_metric_families(page)
    return [one for family in families for one in family.samples if one.name == name]
