"""Engines that die, fail, hang or are restarted inside one daemon: what clients and operators see.

One daemon for the whole file; each test leaves it serving, but for the last, which ends it.
"""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from engine_faults import NO_ANSWER, RAISE, Faults
from prometheus_client.parser import text_string_to_metric_families
from serve_process import (
    AS_ON_CUDA,
    START_S,
    NodeFiles,
    NotifySocket,
    ServeProcess,
    hisparsed,
    plain_environment,
    until,
)
from streaming import COMPLETIONS, call, complete, stream, usage_of

from hisparsed.control.journal.store import FILE_NAME
from hisparsed.control.status.document import EngineStatus
from hisparsed.node.resources import noted_folder

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]

SUPERVISION = {
    "most_restarts": 5,
    "first_wait": "200ms",
    "longest_wait": "1s",
    "hang_after": "3s",
}
PROMPT = "A prompt that must stand in no file of the daemon. " * 8
LONG_ANSWER = 1500
EXIT_ENGINE_GONE = 70


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    return Faults(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NotifySocket]:
    with NotifySocket(tmp_path_factory.mktemp("service") / "notify.sock") as manager:
        yield manager


@pytest.fixture(scope="module")
def starting(
    tmp_path_factory: pytest.TempPathFactory, faults: Faults, manager: NotifySocket
) -> Iterator[ServeProcess]:
    """The daemon, perhaps before its first engine serves."""
    files = NodeFiles(tmp_path_factory.mktemp("supervised"), supervision=SUPERVISION)
    served = ServeProcess(
        files,
        program=AS_ON_CUDA,
        NOTIFY_SOCKET=str(manager.path),
        WATCHDOG_USEC="4000000",
        **faults.environment,
    )
    yield served
    served.kill()


@pytest.fixture
def daemon(starting: ServeProcess) -> ServeProcess:
    return starting.wait_until_ready()


def life(node: ServeProcess) -> EngineStatus:
    found = node.status().engine
    assert found is not None
    return found


def serves_again(node: ServeProcess, restarts: int) -> EngineStatus:
    """Once more engines have served than ``restarts``."""
    until(
        "another engine serves",
        lambda: life(node).state == "serving" and life(node).restarts_total > restarts,
        timeout_s=START_S,
    )
    return life(node)


def unready(node: ServeProcess) -> str | None:
    with node.control_http() as control:
        answer = control.get("/readyz")
    return None if answer.status_code == 200 else str(answer.json()["error"]["message"])


def counters(node: ServeProcess) -> dict[tuple[str, tuple[str, ...]], float]:
    page = node.http.get("/metrics").text
    return {
        (sample.name, tuple(sorted(sample.labels.values()))): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def event_kinds(node: ServeProcess, limit: int = 30) -> list[str]:
    with node.control_http() as control:
        events = control.get("/v1/journal/events", params={"limit": limit}).json()["events"]
    return [event["kind"] for event in events]


def post(node: ServeProcess, path: str, **body: Any) -> httpx.Response:
    with node.control_http() as control:
        return control.post(path, json={"actor": "test", **body})


def tokens(node: ServeProcess) -> str:
    return str(complete(node.http, PROMPT, 24)["choices"][0]["text"])


def refused_for_want_of_an_engine(response: httpx.Response) -> bool:
    return (
        response.status_code == 503
        and int(response.headers["retry-after"]) >= 1
        and response.json()["error"]["type"] == "engine_unavailable"
        and response.json()["error"]["code"] == 503
    )


@contextmanager
def beside(node: ServeProcess, max_tokens: int) -> Iterator[list[httpx.Response]]:
    """A whole call in a thread; its answer is in the list at the end."""
    answers: list[httpx.Response] = []

    def ask() -> None:
        with httpx.Client(base_url=node.url, timeout=120.0) as http:
            answers.append(http.post(COMPLETIONS, json=call("beside", max_tokens)))

    thread = threading.Thread(target=ask)
    thread.start()
    yield answers
    thread.join(120.0)
    assert answers, "the call never came back"


@contextmanager
def listening(node: ServeProcess) -> Iterator[list[str]]:
    """The kinds of events on one event stream that stays open."""
    kinds: list[str] = []
    control = httpx.Client(
        transport=httpx.HTTPTransport(uds=str(node.files.socket)),
        base_url="http://node",
        timeout=60.0,
    )
    opened = threading.Event()

    def listen() -> None:
        try:
            with control.stream("GET", "/v1/events") as response:
                opened.set()
                kind = ""
                for line in response.iter_lines():
                    if line.startswith("event: "):
                        kind = line.removeprefix("event: ")
                    elif line.startswith("data: ") and kind == "event":
                        kinds.append(json.loads(line.removeprefix("data: "))["kind"])
        except httpx.HTTPError:
            pass  # closed below

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    assert opened.wait(20.0)
    yield kinds
    control.close()


def evidence_of(node: ServeProcess) -> dict[str, Any]:
    last = life(node).last_exit
    assert last is not None
    assert last.evidence is not None
    path = Path(last.evidence)
    assert path.stat().st_mode & 0o777 == 0o640
    text = path.read_text("utf-8")
    assert PROMPT[:40] not in text
    found: dict[str, Any] = json.loads(text)
    return found


def test_before_the_first_engine_serves_the_node_answers_for_itself(
    starting: ServeProcess,
) -> None:
    node = starting

    def answer() -> httpx.Response | None:
        try:
            return node.http.post(COMPLETIONS, json=call("early", 4))
        except httpx.TransportError:
            return None

    response = until("the port answers", answer, timeout_s=60)
    assert refused_for_want_of_an_engine(response), response.text
    assert counters(node)["hisparsed_engine_state", ("starting",)] == 1
    assert "the engine has been starting" in (unready(node) or "")
    with node.control_http() as control:
        assert control.get("/healthz").status_code == 200
    assert post(node, "/v1/engine/restart").json()["error"]["code"] == "engine_busy"


def test_a_first_engine_that_is_killed_while_it_starts_is_started_again(
    starting: ServeProcess,
) -> None:
    node = starting
    first = until("the engine core starts", lambda: spawned(node), timeout_s=START_S)
    first.send_signal(signal.SIGKILL)
    node.wait_until_ready()
    (how,) = evidence_of(node)["processes"]
    assert f"(pid {first.pid}) was killed by SIGKILL" in how
    found = life(node)
    assert (found.restarts_total, found.died_total) == (0, 0), "no engine has served before"
    assert "engine-start-failed" in event_kinds(node)


def spawned(node: ServeProcess) -> psutil.Process | None:
    """The engine core, once it has run for a second; the daemon looks at times."""
    for one in node.children():
        try:
            engine = any("spawn_main" in word for word in one.cmdline())
            if engine and time.time() - one.create_time() > 1.0:
                return one
        except psutil.NoSuchProcess:
            continue
    return None


def test_a_killed_engine_is_replaced_and_nothing_is_lost(
    daemon: ServeProcess, manager: NotifySocket
) -> None:
    node = daemon
    lengths = len(manager.having("WATCHDOG_USEC"))
    share = {"key": "pools.offload.start", "value": "30%", "for_s": None}
    assert post(node, "/v1/policy/set", **share).status_code == 200
    assert post(node, "/v1/freeze", levers=["watermark"]).status_code == 200
    expected, before, first = tokens(node), life(node), node.engine()
    until("a move is counted", lambda: lent_share(node) == pytest.approx(30, abs=1))
    counted = counters(node)
    with listening(node) as heard, beside(node, LONG_ANSWER) as whole:
        with stream(node.http, COMPLETIONS, call(PROMPT, LONG_ANSWER)) as events:
            received = [next(events)]
            until("both run", lambda: node.running() == 2)
            first.send_signal(signal.SIGKILL)
            received += events
        until("the node is not ready", lambda: unready(node))
        assert refused_for_want_of_an_engine(node.http.post(COMPLETIONS, json=call("late", 4)))
        assert node.status().canary is None, "that of the dead engine"
        assert "vllm:num_requests_running{" not in node.http.get("/metrics").text
        after = serves_again(node, before.restarts_total)
        until("the stream of events goes on", lambda: "engine-ready" in heard)

    assert refused_for_want_of_an_engine(whole[0]), whole[0].text
    assert received[-1] == "[DONE]"
    assert json.loads(received[-2])["error"]["code"] == 503
    assert after.died_total == before.died_total + 1
    assert "SIGKILL" in " ".join(evidence_of(node)["processes"])
    assert not psutil.pid_exists(first.pid)
    turns = [kind for kind in heard if kind.startswith("engine-")]
    assert turns == ["engine-died", "engine-restarting", "engine-ready"]

    until("the split is where it was", lambda: lent_share(node) == pytest.approx(30, abs=1))
    status = node.status()
    assert status.policy.frozen == ["watermark"]
    assert [one.key for one in status.policy.overrides] == ["pools.offload.start"]
    assert tokens(node) == expected, "a restart changed tokens"
    now = counters(node)
    moves = {key: value for key, value in counted.items() if key[0] == "hisparsed_moves_total"}
    assert moves
    assert all(now[key] >= value for key, value in moves.items()), "a counter went backwards"
    assert now["hisparsed_engine_deaths_total", ()] == after.died_total
    runtime = noted_folder(node.files.state_dir)
    assert runtime is not None
    assert len([one for one in runtime.iterdir() if one.name.isdigit()]) == 1, "files are left"
    assert any("Restarting the engine" in said for said in manager.having("STATUS"))
    longer_and_back = len(manager.having("WATCHDOG_USEC")) - lengths
    assert longer_and_back == 2, "longer while it restarts, then as before"
    assert manager.having("WATCHDOG_USEC")[-1] == "4000000"


def test_an_executor_that_raises_is_replaced(daemon: ServeProcess, faults: Faults) -> None:
    node, before = daemon, life(daemon)
    faults.begin(RAISE)
    try:
        response = node.http.post(COMPLETIONS, json=call(PROMPT, 8))
    finally:
        faults.end(RAISE)
    assert refused_for_want_of_an_engine(response), response.text
    serves_again(node, before.restarts_total)
    log = evidence_of(node)["log"]
    assert any("a test wants the executor to fail" in line["text"] for line in log)
    complete(node.http, PROMPT, 4)


def test_one_that_is_killed_by_the_first_question_did_not_start(
    daemon: ServeProcess, faults: Faults
) -> None:
    """vLLM's own calls wait forever for the answer of an engine that was up and has died."""
    node, before = daemon, life(daemon)
    faults.begin(NO_ANSWER)
    node.engine().send_signal(signal.SIGKILL)
    after = serves_again(node, before.restarts_total)
    assert after.died_total == before.died_total + 1, "the second did not serve"
    assert after.ends_in_window == before.ends_in_window + 2
    assert event_kinds(node)[:4].count("engine-start-failed") == 1
    (how,) = evidence_of(node)["processes"]
    assert "was killed by SIGKILL" in how
    complete(node.http, PROMPT, 4)


def test_a_step_that_compiles_is_not_taken_for_hung(daemon: ServeProcess, faults: Faults) -> None:
    before = life(daemon)
    faults.compile_in_the_next_step()
    began = time.monotonic()
    complete(daemon.http, PROMPT, 4)
    assert time.monotonic() - began > 5.0, "longer than supervision.hang_after"
    assert life(daemon).died_total == before.died_total


def test_an_engine_that_hangs_is_killed_and_replaced(daemon: ServeProcess) -> None:
    node, before, engine = daemon, life(daemon), daemon.engine()
    with beside(node, LONG_ANSWER) as whole:
        until("the call runs", lambda: node.running() == 1)
        engine.send_signal(signal.SIGSTOP)
        until("it is taken for hung", lambda: life(node).died_total > before.died_total)
    assert refused_for_want_of_an_engine(whole[0]), whole[0].text
    after = serves_again(node, before.restarts_total)
    assert after.last_exit is not None
    assert "supervision.hang_after 3s" in after.last_exit.why
    assert not psutil.pid_exists(engine.pid)
    complete(node.http, PROMPT, 4)


def test_a_planned_restart_drains_and_puts_pending_values_in_force(daemon: ServeProcess) -> None:
    node, before = daemon, life(daemon)
    node.files.document["reference"]["max_num_seqs"] = 4
    node.files.write_config()

    def pending() -> list[str]:
        return [one.key for one in node.status().policy.pending_restart]

    until("the change is seen", lambda: pending() == ["reference.max_num_seqs"])
    with stream(node.http, COMPLETIONS, call(PROMPT, LONG_ANSWER)) as events:
        received = [next(events)]
        plan = post(node, "/v1/engine/restart", drain_s=240, dry_run=True).json()
        assert "reference.max_num_seqs 4 (was 8)" in plan["sentence"]
        assert not plan["begun"]
        assert post(node, "/v1/engine/restart", drain_s=240).json()["begun"]
        assert life(node).state == "draining"
        assert refused_for_want_of_an_engine(node.http.post(COMPLETIONS, json=call("late", 4)))
        again = post(node, "/v1/engine/restart")
        assert (again.status_code, again.json()["error"]["code"]) == (409, "engine_busy")
        received += events
    assert usage_of(received)["completion_tokens"] == LONG_ANSWER, "the drain cut a call"
    after = serves_again(node, before.restarts_total)
    assert after.planned_restarts_total == before.planned_restarts_total + 1
    assert after.died_total == before.died_total
    observed = node.status().observed
    assert observed is not None
    assert observed.admission.max_running == 4
    assert pending() == []


def test_values_that_do_not_start_are_quarantined_and_the_last_good_ones_serve(
    daemon: ServeProcess,
) -> None:
    node = daemon
    node.files.document["reference"]["gpu_blocks"] = 10
    node.files.write_config()
    with stream(node.http, COMPLETIONS, call(PROMPT, LONG_ANSWER)) as events:
        received = [next(events)]
        restarting = command(node, "restart", "--yes", "--now")
        received += events
    assert json.loads(received[-2])["error"]["code"] == 503, "cut calls end in an error"
    said, _ = restarting.communicate(timeout=START_S)
    assert restarting.returncode == 1
    assert "reference.gpu_blocks" in said
    after = life(node)
    assert after.state == "serving"
    assert after.quarantined is not None
    assert [one.key for one in after.quarantined.changes] == ["reference.gpu_blocks"]
    assert "engine-quarantined" in event_kinds(node)
    assert "QUARANTINED" in hisparsed("status", "--socket", str(node.files.socket)).stdout
    assert counters(node)["hisparsed_engine_values_quarantined", ()] == 1
    complete(node.http, PROMPT, 4)


def test_too_many_deaths_end_the_daemon_and_the_next_one_knows_the_last_good_values(
    daemon: ServeProcess,
) -> None:
    node, before = daemon, life(daemon)
    for _ in range(before.most_restarts - before.ends_in_window):
        restarts = life(node).restarts_total
        node.engine().send_signal(signal.SIGKILL)
        serves_again(node, restarts)
    quarantined = life(node).quarantined is not None
    node.engine().send_signal(signal.SIGTERM)
    # A daemon that takes the signal for its own ends with 0.
    assert node.wait(60) == EXIT_ENGINE_GONE, node.log_end()
    node.assert_nothing_left()
    assert "supervision.most_restarts 5" in node.log()
    with closing(sqlite3.connect(node.files.state_dir / FILE_NAME)) as journal:
        kinds = [kind for (kind,) in journal.execute("SELECT kind FROM events")]
        ticks = journal.execute("SELECT count(*) FROM ticks").fetchone()[0]
    # All ends but that of the engine that the first question killed: it had not served.
    assert kinds.count("engine-died") == before.most_restarts
    assert kinds[-1] == "engine-gone"
    assert ticks > 0

    second = ServeProcess(node.files)
    try:
        second.wait_until_ready()
        assert (life(second).quarantined is not None) == quarantined
        complete(second.http, PROMPT, 4)
        assert second.end() == 0, second.log_end()
        second.assert_nothing_left()
    finally:
        second.kill()


def lent_share(node: ServeProcess) -> float:
    derived = node.status().derived
    assert derived is not None
    pools = derived.pools
    return 100 * pools.offload.capacity_bytes / pools.budget_bytes


def command(node: ServeProcess, *words: str) -> subprocess.Popen[str]:
    """`hisparsed engine ...`, running."""
    return subprocess.Popen(
        [sys.executable, "-m", "hisparsed", "engine", *words, "--socket", str(node.files.socket)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=plain_environment(),
    )
