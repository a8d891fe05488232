"""What clients, operators and the service manager see of a node that serves, until it is stopped.

One daemon for the whole file; each test leaves it as it was, but for the last, which ends it.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from serve_process import (
    NodeFiles,
    NotifySocket,
    ServeProcess,
    hisparsed,
    message_of,
    policy_document,
    refusal,
    serve,
    until,
)
from streaming import CHAT, COMPLETIONS, call, complete, stream, text_of, usage_of

from hisparsed.control.journal.store import FILE_NAME
from hisparsed.control.status.document import CanaryStatus
from hisparsed.engine.reference.launch import SERVED_MODEL_NAME
from hisparsed.policy.signals import Lever, Snapshot

pytestmark = pytest.mark.engine

MAX_MODEL_LEN = 2048
LONG_ANSWER = 800
"""Tokens; some seconds of generation."""
BUDGET_BLOCKS = 24 * 2**20 // (8 * 16 * 128) - 1
"""Of 8 layers, 16 tokens and rows of 128 bytes; vLLM keeps one as its null block."""
LONG_PROMPT = "The pools share one budget. " * 20
GREETING = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}]


@pytest.fixture
def policy(node: ServeProcess) -> Iterator[ServeProcess]:
    """The node; its first policy is in force again after the test."""
    yield node
    node.files.write_policy(policy_document())
    reload(node)


def reload(node: ServeProcess) -> httpx.Response:
    with node.control_http() as control:
        return control.post("/v1/policy/reload", json={"actor": "test"})


def chat(**options: Any) -> dict[str, Any]:
    return {
        "model": SERVED_MODEL_NAME,
        "messages": GREETING,
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
        **options,
    }


def test_the_model_is_listed_with_its_length(node: ServeProcess) -> None:
    (card,) = node.http.get("/v1/models").json()["data"]
    assert card["id"] == SERVED_MODEL_NAME
    assert card["max_model_len"] == MAX_MODEL_LEN
    assert node.http.get("/health").status_code == 200


def listens_on(process: psutil.Process) -> set[int]:
    return {one.laddr.port for one in process.net_connections() if one.status == psutil.CONN_LISTEN}


def test_the_engine_is_spawned_and_shares_no_socket(node: ServeProcess) -> None:
    """Also where vLLM would fork: see ``AS_ON_CUDA``."""
    assert listens_on(psutil.Process(node.pid)) == {node.files.port}
    assert node.files.port not in listens_on(node.engine())


def test_a_completion_is_the_same_whole_and_streamed(node: ServeProcess) -> None:
    whole = complete(node.http, "Once upon a time", 24)
    assert whole["usage"]["completion_tokens"] == 24
    with stream(node.http, COMPLETIONS, call("Once upon a time", 24)) as events:
        received = list(events)
    assert len(received) > 10, "the tokens do not come as they are made"
    assert text_of(received) == whole["choices"][0]["text"]
    assert usage_of(received)["completion_tokens"] == 24


def test_a_chat_is_the_same_whole_and_streamed(node: ServeProcess) -> None:
    whole = node.http.post(CHAT, json=chat()).json()
    with stream(node.http, CHAT, chat()) as events:
        received = list(events)
    message = whole["choices"][0]["message"]
    assert message["role"] == "assistant"
    assert message["content"]
    assert text_of(received) == message["content"]
    assert usage_of(received)["prompt_tokens"] == whole["usage"]["prompt_tokens"]


def test_a_repeated_prompt_hits_its_prefix_and_gives_the_same_tokens(node: ServeProcess) -> None:
    first = complete(node.http, LONG_PROMPT, 16)
    again = complete(node.http, LONG_PROMPT, 16)
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= first["usage"]["prompt_tokens"] - 2 * 16, "all whole blocks should be held"
    assert again["choices"][0]["text"] == first["choices"][0]["text"]


def test_a_seed_repeats_a_sample_and_another_seed_does_not(node: ServeProcess) -> None:
    def sample(seed: int) -> str:
        answer = complete(node.http, "Draw", 32, temperature=1.0, seed=seed)
        return str(answer["choices"][0]["text"])

    assert sample(7) == sample(7)
    assert sample(7) != sample(8)


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"prompt": "x" * (MAX_MODEL_LEN + 1)}, 400, str(MAX_MODEL_LEN)),
        ({"model": "gpt-nope"}, 404, "gpt-nope"),
        ({"max_tokens": 0}, 400, "max_tokens must be at least 1, got 0"),
        ({"temperature": -1}, 400, "temperature must be non-negative"),
        ({"prompt": [5, 9999]}, 400, "9999"),
        ({"prompt": ""}, 400, "prompt"),
        ({"thinking_token_budget": 3}, 400, "thinking_token_budget"),
        ({"presence_penalty": 2.5}, 400, "presence_penalty"),
        ({"logit_bias": {"9999": 10}}, 400, "9999"),
        ({"structured_outputs": {"regex": "("}}, 400, "regex"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_bad_call_is_refused_with_the_reason(
    node: ServeProcess, changes: dict[str, Any], status: int, words: str
) -> None:
    response = node.http.post(COMPLETIONS, json=call("x", 4) | changes)
    assert response.status_code == status, response.text
    assert words in response.json()["error"]["message"]
    assert complete(node.http, "still there", 2)["usage"]["completion_tokens"] == 2


def test_tools_without_a_parser_are_refused_with_our_key_for_it(node: ServeProcess) -> None:
    asked = chat(tools=[{"type": "function", "function": {"name": "a"}}])
    answer = node.http.post(CHAT, json=asked)
    assert answer.status_code == 400, answer.text
    assert "frontend_args.tool_call_parser" in answer.json()["error"]["message"]


def test_a_body_that_is_not_json_is_refused(node: ServeProcess) -> None:
    headers = {"content-type": "application/json"}
    response = node.http.post(COMPLETIONS, content=b'{"model": ', headers=headers)
    assert response.status_code == 400
    assert "JSON" in response.json()["error"]["message"]


def test_a_client_that_goes_away_frees_its_place(node: ServeProcess) -> None:
    until("the node is idle", lambda: node.running() == 0)
    with httpx.Client(base_url=node.url, timeout=60.0) as leaver:
        with stream(leaver, COMPLETIONS, call("goodbye", 1900)) as events:
            next(events)
            until("the call runs", lambda: node.running() == 1)
        before = node.status().observed
        assert before is not None
    until("the call is aborted", lambda: node.running() == 0)
    after = node.status().observed
    assert after is not None
    generated = after.tokens.generated_total - before.tokens.generated_total
    assert generated < 1000, "the call ran on to its end"


def test_metrics_are_one_page_without_duplicates(node: ServeProcess) -> None:
    complete(node.http, "count me", 2)
    page = node.http.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    families = list(text_string_to_metric_families(page.text))
    names = [family.name for family in families]
    assert sorted(names) == sorted(set(names))
    assert "vllm:prompt_tokens" in names
    ours = [family for family in families if family.name.startswith("hisparsed_")]
    assert len(ours) > 20
    assert all(family.documentation for family in ours)
    opened = next(family for family in ours if family.name == "hisparsed_open_requests")
    assert [sample.value for sample in opened.samples] == [0]
    assert "vllm:num_requests_running{" in page.text


def test_metrics_are_given_as_the_scraper_asks(node: ServeProcess) -> None:
    plain = node.http.get("/metrics", headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    asked = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3"
    packed = node.http.get("/metrics", headers={"accept": asked, "accept-encoding": "gzip"})
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.headers["content-type"].startswith("application/openmetrics-text")
    assert int(packed.headers["content-length"]) < len(plain.content) / 4
    found = [
        {sample.name for family in families for sample in family.samples}
        for families in (
            openmetrics.text_string_to_metric_families(packed.text),
            text_string_to_metric_families(plain.text),
        )
    ]
    assert found[0] == found[1], "dashboards and alerts find the same names"


def test_status_as_a_page_and_as_json(node: ServeProcess) -> None:
    page = hisparsed("status", "--socket", str(node.files.socket))
    assert page.returncode == 0, page.stderr
    assert "reference node, serving, up" in page.stdout
    assert f"pid {node.pid}" in page.stdout
    document = hisparsed("status", "--json", "--socket", str(node.files.socket))
    status = json.loads(document.stdout)
    assert status["node"]["pid"] == node.pid
    pools, geometry = status["derived"]["pools"], status["observed"]["geometry"]
    assert pools["budget_bytes"] == BUDGET_BLOCKS * geometry["host_block_bytes"]
    capacities = pools["hisparse"]["capacity_bytes"] + pools["offload"]["capacity_bytes"]
    assert capacities == pools["budget_bytes"]


def test_explain_says_why_the_levers_stand_where_they_do(node: ServeProcess) -> None:
    text = hisparsed("explain", "--socket", str(node.files.socket))
    assert text.returncode == 0, text.stderr
    assert "started" in text.stdout.lower()
    asked = ("explain", "--json", "--all", "split", "--last", "5")
    found = json.loads(hisparsed(*asked, "--socket", str(node.files.socket)).stdout)["decisions"]
    assert len(found) == 5
    assert {one["lever"] for one in found} == {"split"}
    ticks = [one["tick"] for one in found]
    assert ticks == sorted(ticks, reverse=True)


def test_sighup_takes_a_good_policy_and_keeps_the_old_one_for_a_bad_one(
    policy: ServeProcess,
) -> None:
    node = policy
    before = node.status().policy.generation
    node.files.write_policy(policy_document(tick="150ms"))
    node.signal(signal.SIGHUP)
    until("the policy is in force", lambda: node.status().policy.generation == before + 1)

    node.files.write_policy(policy_document(tick="150 parsecs"))
    node.signal(signal.SIGHUP)
    until("the policy is rejected", lambda: node.status().policy.last_error is not None)
    status = node.status()
    assert status.policy.generation == before + 1
    assert status.loop.tick_s == 0.15
    reason = status.policy.last_error
    assert reason is not None
    assert "policy.yaml:" in reason
    assert "150 parsecs" in reason
    assert "150 parsecs" in node.log()
    assert status.events[0].kind == "policy-rejected"
    assert "REJECTED" in hisparsed("status", "--socket", str(node.files.socket)).stdout


def test_a_policy_that_was_cut_off_says_what_went_with_it(policy: ServeProcess) -> None:
    text = policy.files.policy_path.read_text("utf-8")
    policy.files.policy_path.write_text(text[: text.index("stale_after")] + "version: 1\n", "utf-8")
    until(
        "it is told",
        lambda: any(
            "2 keys return to their defaults: tick, stale_after" in one.sentence
            for one in policy.status().events
        ),
    )


def test_one_word_holds_every_lever_and_the_status_says_so(node: ServeProcess) -> None:
    before = node.status().policy.effective
    assert hisparsed("freeze", "--socket", str(node.files.socket)).returncode == 0
    assert len(node.status().policy.frozen) == len(Lever)
    assert "frozen" in hisparsed("status", "--socket", str(node.files.socket)).stdout
    body: dict[str, Any] = {"actor": "test", "levers": [lever.value for lever in Lever]}
    with node.control_http() as control:
        assert control.post("/v1/mode", json=body | {"mode": "off"}).status_code == 200
        assert control.post("/v1/thaw", json=body).status_code == 200
        assert node.status().policy.effective == "off"
        assert control.post("/v1/mode", json=body | {"mode": None}).status_code == 200
    assert node.status().policy.effective == before != "off"


def test_a_lever_is_frozen_and_thawed_through_the_api(node: ServeProcess) -> None:
    def split() -> Any:
        return next(one for one in node.status().levers if one.lever == "split")

    body = {"actor": "test", "levers": ["split"]}
    with node.control_http() as control:
        assert control.post("/v1/freeze", json=body).json()["frozen"] == ["split"]
        until("the split is frozen", lambda: split().frozen)
        assert control.post("/v1/thaw", json=body).json()["frozen"] == []
        until("the split is free", lambda: not split().frozen)
        assert control.post("/v1/freeze", json={"levers": []}).status_code == 400


def test_a_policy_that_asks_for_more_offload_moves_blocks_while_a_request_runs(
    policy: ServeProcess,
) -> None:
    node = policy

    def lent() -> int:
        observed = node.status().observed
        assert observed is not None
        return observed.offload.lent_blocks

    assert lent() == round(0.2 * BUDGET_BLOCKS)
    text = complete(node.http, LONG_PROMPT, 200)["choices"][0]["text"]
    with stream(node.http, COMPLETIONS, call(LONG_PROMPT, 200)) as events:
        received = [next(events)]
        pools = {"offload": {"floor": "40%", "ceiling": "50%"}}
        node.files.write_policy(policy_document(pools=pools, rebalance={}))
        # The watch on the folder may have seen the change first.
        assert reload(node).json()["outcome"] in {"loaded", "unchanged"}
        until("the blocks are lent", lambda: lent() >= 0.4 * BUDGET_BLOCKS, timeout_s=5)
        received += events
    assert text_of(received) == text, "moving blocks changed tokens"
    found = hisparsed("explain", "split", "--socket", str(node.files.socket)).stdout
    assert "OutsideBounds" in found


def test_decisions_are_in_the_journal_file(node: ServeProcess) -> None:
    until("records are written", lambda: node.status().journal.written > 0)
    journal = node.status().journal
    assert journal.writing
    assert journal.dropped == 0
    path = node.files.state_dir / FILE_NAME
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert database.execute("SELECT count(*) FROM ticks").fetchone()[0] > 0


def test_a_journal_that_somebody_removes_is_told_and_begun_anew(node: ServeProcess) -> None:
    path = node.files.state_dir / FILE_NAME
    path.unlink()
    until(
        "it is an event",
        lambda: "journal-lost" in [one.kind for one in node.status().events],
    )
    until("there is another", path.exists)
    assert node.status().journal.writing


PROMPT = 2 * 64
"""Two times the top-k of the reference node."""


def ask(node: ServeProcess) -> CanaryStatus:
    result = hisparsed("canary", "--now", "--json", "--socket", str(node.files.socket))
    assert result.returncode == 0, result.stderr + result.stdout
    return CanaryStatus.model_validate(json.loads(result.stdout))


def observed(node: ServeProcess) -> Snapshot:
    found = node.status().observed
    assert found is not None
    return found


def another_tick(node: ServeProcess) -> None:
    tick = node.status().loop.tick
    until("another tick", lambda: node.status().loop.tick > tick)


def of_requests(node: ServeProcess) -> dict[str, float]:
    """vLLM's own counters of what clients sent and got."""
    families = text_string_to_metric_families(node.http.get("/metrics").text)
    return {
        sample.name: sample.value
        for family in families
        for sample in family.samples
        if sample.name in ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
    }


def test_a_node_answers_its_canary_alike_in_every_residency(node: ServeProcess) -> None:
    finished = observed(node).requests.finished_total
    complete(node.http, "somebody else's prompt", 4)
    until("it is counted", lambda: observed(node).requests.finished_total == finished + 1)
    another_tick(node)
    before, counted = observed(node), of_requests(node)
    first, second = ask(node), ask(node)
    assert (second.rounds_total - first.rounds_total, second.mismatches_total) == (1, 0)
    assert second.prompt_tokens == PROMPT
    none, mixed, full = second.last_round
    assert all(one.equal for one in (none, mixed, full))
    assert none.prefix_hit_tokens == mixed.prefix_hit_tokens == PROMPT - 16
    assert none.steps_none > none.steps_full + none.steps_mixed
    assert mixed.steps_mixed > mixed.steps_full + mixed.steps_none
    assert full.steps_full > full.steps_mixed + full.steps_none
    another_tick(node)
    after = observed(node)
    assert (after.tokens, after.prefix, after.latencies) == (
        before.tokens,
        before.prefix,
        before.latencies,
    )
    assert of_requests(node) == counted, "its own calls are no client's"
    assert after.sessions.live_sessions <= before.sessions.live_sessions
    assert after.requests.finished_total == before.requests.finished_total
    assert not node.status().policy.frozen


def test_it_is_asked_by_itself_where_the_policy_says_so(node: ServeProcess) -> None:
    def rounds() -> int:
        canary = node.status().canary
        assert canary is not None
        return canary.rounds_total

    before = rounds()
    keys = {"canary.least_gap": "1s", "canary.every": "1s", "canary.enabled": "true"}
    with node.control_http() as control:
        for key, value in keys.items():
            body = {"actor": "test", "key": key, "value": value, "for_s": None}
            assert control.post("/v1/policy/set", json=body).status_code == 200
        until("two rounds have ended", lambda: rounds() >= before + 2)
        for key in reversed(keys):
            answer = control.post("/v1/policy/unset", json={"actor": "test", "key": key})
            assert answer.status_code == 200, answer.text
    canary = node.status().canary
    assert canary is not None
    assert canary.mismatches_total == canary.failed_total == 0
    assert canary.last_trigger in ("period", "start")


def test_the_start_asks_for_time_and_ends_in_ready(
    node: ServeProcess, notified: NotifySocket
) -> None:
    assert "Starting the engine" in notified.having("STATUS")[0]
    assert notified.place("EXTEND_TIMEOUT_USEC") < notified.place("READY")
    assert node.url in notified.messages[notified.place("READY")]["STATUS"]


def test_ticks_of_a_serving_node_feed_the_watchdog(
    node: ServeProcess, notified: NotifySocket
) -> None:
    before = len(notified.having("WATCHDOG"))
    until("the watchdog is fed", lambda: len(notified.having("WATCHDOG")) > before)
    assert notified.place("WATCHDOG") > notified.place("EXTEND_TIMEOUT_USEC")


def test_a_stopped_engine_is_not_ready_and_starves_the_watchdog_until_it_is_continued(
    node: ServeProcess, notified: NotifySocket
) -> None:
    engine = node.engine()
    until("the watchdog is fed", lambda: notified.having("WATCHDOG"))
    with node.control_http() as control:
        changes = {"actor": "test", "key": "stale_after", "value": "1s", "for_s": None}
        assert control.post("/v1/policy/set", json=changes).status_code == 200
        assert control.get("/readyz").status_code == 200
    engine.send_signal(signal.SIGSTOP)
    try:
        until("reports stop", lambda: node.status().observed.report_age_s > 1.5)  # type: ignore[union-attr]
        hungry = len(notified.having("WATCHDOG"))
        until("reports are old", lambda: node.status().observed.report_age_s > 4)  # type: ignore[union-attr]
        assert len(notified.having("WATCHDOG")) == hungry
        with node.control_http() as control:
            unready = control.get("/readyz")
            assert unready.status_code == 503
            assert "the engine reported" in unready.json()["error"]["message"]
            assert control.get("/healthz").status_code == 200
        assert node.status().stalled is None, "without a report nobody knows that it stands still"
    finally:
        engine.send_signal(signal.SIGCONT)
    until("the watchdog is fed again", lambda: len(notified.having("WATCHDOG")) > hungry)
    with node.control_http() as control:
        until("the node is ready again", lambda: control.get("/readyz").status_code == 200)
        undo = {"actor": "test", "key": "stale_after"}
        assert control.post("/v1/policy/unset", json=undo).status_code == 200


def test_a_reload_by_signal_is_framed(node: ServeProcess, notified: NotifySocket) -> None:
    before = len(notified.having("READY"))
    node.signal(signal.SIGHUP)
    until("the reload has ended", lambda: len(notified.having("READY")) > before)
    assert notified.having("RELOADING")


@pytest.mark.parametrize("key", ["api", "metrics"])
def test_a_port_that_a_live_node_has_is_refused(
    node: ServeProcess, files: NodeFiles, key: str
) -> None:
    files.document[key] = {"port": node.files.port}
    message = refusal(files)
    assert f"{key}.port: 127.0.0.1:{node.files.port} is taken" in message
    assert not files.state_dir.exists()


def test_a_state_folder_of_a_live_node_is_refused_with_its_pid(
    node: ServeProcess, files: NodeFiles
) -> None:
    files.document["state_dir"] = str(node.files.state_dir)
    message = refusal(files)
    assert f"state_dir: {node.files.state_dir} belongs to a running daemon" in message
    assert f"pid {node.pid}" in message


def test_a_control_socket_of_a_live_node_is_refused_and_goes_on_answering(
    node: ServeProcess, files: NodeFiles
) -> None:
    files.document["control_socket"] = str(node.files.socket)
    files.write_config()
    message = message_of(serve(files))
    assert f"control_socket: another hisparsed serves on {node.files.socket}" in message
    assert node.status().lifecycle == "serving"


def test_a_sigterm_lets_a_running_stream_finish_and_refuses_new_calls(
    node: ServeProcess, notified: NotifySocket
) -> None:
    with stream(node.http, COMPLETIONS, call("drain", LONG_ANSWER)) as events:
        received = [next(events)]
        # As Ctrl-C does it: only the daemon may take it for its own.
        os.killpg(node.pid, signal.SIGTERM)
        until("the node drains", lambda: node.status().lifecycle == "draining")
        refused = node.http.post(COMPLETIONS, json=call("late", 4))
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "node_draining"
        assert refused.headers["connection"] == "close", "or the next call comes here again"
        with node.control_http() as control:
            assert control.get("/readyz").status_code == 503
        received += events
    assert usage_of(received)["completion_tokens"] == LONG_ANSWER
    assert node.wait() == 0, node.log_end()
    assert "Stopped; all calls ended." in node.log()
    assert "Traceback" not in node.log()
    node.assert_nothing_left()
    assert notified.having("STOPPING"), "the manager was not told of the stop"
