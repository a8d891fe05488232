"""A whole node from outside: who gets in, what it serves, what it logs, what it never does.

One daemon with a key, a collector for traces, debug logs, its own chat template and parsers, and
vLLM's switches for developers on. The last test ends it.
"""

from __future__ import annotations

import http.client
import json
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from serve_process import NodeFiles, ServeProcess, until
from streaming import CHAT, COMPLETIONS, call, complete, stream

from hisparsed.control.api.client import ControlClient
from hisparsed.errors import UserError


class OtlpCollector:
    """``bodies`` are the exports as they came, protobuf; ``url`` is for vLLM's setting."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        bodies = self.bodies

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                bodies.append(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Says nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> OtlpCollector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


pytestmark = pytest.mark.engine

KEY = "a-key-of-this-test-alone"
ACCENTED = "schl\u00fcssel"
COMMENT = "# keys of this test"
OTHER_KEY = "vllms-own-variable"
ENVIRONMENT = {
    "VLLM_API_KEY": OTHER_KEY,
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_DEBUG_LOG_API_SERVER_RESPONSE": "true",
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
    "OTEL_BSP_SCHEDULE_DELAY": "100",
}
MARKER = "zanzibarqx"
"""Part of each prompt, and of nothing else."""
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
LONG = {"max_tokens": 1_500, "temperature": 0, "ignore_eos": True}
CONTROL = ("/v1/status", "/v1/requests", "/v1/decisions", "/v1/journal/events", "/v1/history")


PLUGIN = '''
from vllm.entrypoints.generate.base.protocol import (
    ExtractedToolCallInformation, FunctionCall, ToolCall
)
from vllm.reasoning import ReasoningParser, ReasoningParserManager
from vllm.tool_parsers import ToolParser, ToolParserManager


@ToolParserManager.register_module("whole-answer")
class WholeAnswer(ToolParser):
    """Takes whatever the model says for the argument of one call."""

    def extract_tool_calls(self, model_output, request):
        call = FunctionCall(name="say", arguments=model_output)
        return ExtractedToolCallInformation(
            tools_called=True, tool_calls=[ToolCall(function=call)], content=None
        )


@ReasoningParserManager.register_module("first-character")
class FirstCharacter(ReasoningParser):
    """Takes the first character for the reasoning."""

    def is_reasoning_end(self, input_ids):
        return True

    def extract_content_ids(self, input_ids):
        return input_ids[1:]

    def extract_reasoning(self, model_output, request):
        return model_output[:1], model_output[1:]

    def extract_reasoning_streaming(self, *arguments):
        return None
'''
TOOLS = [{"type": "function", "function": {"name": "say", "parameters": {"type": "object"}}}]
SAID = "an answer is due"


@pytest.fixture(scope="module")
def collector() -> Iterator[OtlpCollector]:
    with OtlpCollector() as running:
        yield running


@pytest.fixture(scope="module")
def edge(
    tmp_path_factory: pytest.TempPathFactory, collector: OtlpCollector
) -> Iterator[ServeProcess]:
    folder = tmp_path_factory.mktemp("edge")
    (folder / "plugin.py").write_text(PLUGIN, "utf-8")
    (folder / "chat.jinja").write_text("{{ messages[-1]['content'] }}:", "utf-8")
    files = NodeFiles(
        folder,
        engine_args={
            "otlp_traces_endpoint": collector.url,
            "reasoning_parser": "first-character",
            "reasoning_parser_plugin": str(folder / "plugin.py"),
        },
        frontend_args={
            "chat_template": "chat.jinja",
            "tool_parser_plugin": "plugin.py",
            "tool_call_parser": "whole-answer",
            "enable_auto_tool_choice": True,
            "response_role": "model",
        },
        log={"level": "debug", "format": "json"},
    )
    key_file = files.folder / "keys"
    key_file.write_text(f"{KEY}\n{COMMENT}\n{ACCENTED}\n", encoding="utf-8-sig")
    key_file.chmod(0o640)
    files.document["api"]["api_key_file"] = str(key_file)
    files.write_config()
    served = ServeProcess(files, **ENVIRONMENT)
    try:
        served.wait_until_ready()
        served.http.headers["authorization"] = f"Bearer {KEY}"
        yield served
    finally:
        served.kill()


def answers(edge: ServeProcess) -> dict[str, int]:
    """Every way in which a prompt can go wrong, each with the marker in it; the status of each."""
    text = f"tell me of {MARKER} "
    odd: dict[str, Any] = {
        "no json": f'{{"prompt": "{text}',
        "no object": json.dumps([text]),
        "a prompt of the wrong type": {**call(text, 4), "prompt": {"a": text}},
        "too long": call(text * 2_000, 4),
        "a limit that is not a number": {**call(text, 4), "max_tokens": text},
        "another model": {**call(text, 4), "model": f"model-of-{MARKER}"},
        "an unknown key": {**call(text, 4), MARKER: text},
        "a grammar that is none": {
            **call(text, 4),
            "structured_outputs": {"grammar": f"root ::= {MARKER}"},
        },
        "a bias that is none": {**call(text, 4), "logit_bias": {MARKER: 1}},
        "a template of its own": {**chat(text), "chat_template": f"{{{{ {MARKER}( }}}}"},
        "a role that is none": {**chat(text), "messages": [{"role": MARKER, "content": text}]},
        "good": call(text, 4),
    }
    found = {}
    for name, body in odd.items():
        path = CHAT if isinstance(body, dict) and "messages" in body else COMPLETIONS
        content = body if isinstance(body, str) else json.dumps(body)
        headers = {"content-type": "application/json", "x-hisparsed-session": MARKER}
        found[name] = edge.http.post(path, content=content, headers=headers).status_code
    found["no path"] = edge.http.get(f"/{MARKER}", params={"q": MARKER}).status_code
    wrong = {"authorization": f"Bearer {MARKER}"}
    found["no key"] = edge.http.post(COMPLETIONS, json=call(text, 4), headers=wrong).status_code
    return found


def chat(text: str) -> dict[str, Any]:
    return {"model": "hisparsed-reference", "messages": [{"role": "user", "content": text}]}


def test_no_text_of_a_call_is_anywhere(edge: ServeProcess, collector: OtlpCollector) -> None:
    statuses = answers(edge)
    said = complete(edge.http, f"and of {MARKER}", 32)["choices"][0]["text"]
    answered = json.dumps(said).strip('"')
    assert len(answered) > 16
    assert statuses.pop("good") == 200
    for harmless in ("an unknown key", "a role that is none"):
        assert statuses.pop(harmless) in (200, 400), "vLLM ignores or refuses it"
    assert {name: status for name, status in statuses.items() if not 400 <= status < 500} == {}
    with (
        stream(edge.http, CHAT, {**chat(f"a story of {MARKER}"), **LONG}) as events,
        edge.control_http() as control,
    ):
        next(events)
        until("the call runs", lambda: control.get("/v1/requests").json()["running"])
        pages = {path: control.get(path).text for path in CONTROL}
    with edge.control_http() as control:
        pages["/v1/logs"] = control.get("/v1/logs", params={"limit": 2_000}).text
    pages["/metrics"] = edge.http.get("/metrics").text
    pages["the log"] = edge.log()
    assert len(pages["the log"]) > 10_000, "debug lines are there to be looked at"
    assert [name for name, page in pages.items() if MARKER in page] == []
    assert [name for name, page in pages.items() if answered in page] == []
    assert KEY not in pages["the log"]
    assert "response_body" not in pages["the log"], "vLLM's log of answers is off"
    kept = [path for path in edge.files.state_dir.rglob("*") if path.is_file()]
    assert len(kept) > 3
    assert [path.name for path in kept if MARKER.encode() in path.read_bytes()] == []
    until("spans were sent", lambda: collector.bodies)
    assert not any(MARKER.encode() in body for body in collector.bodies)


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "a"}]}),
        (COMPLETIONS, {"prompt": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}),
        ("/v1/responses", {"input": "a"}),
    ],
    ids=["chat", "completions", "messages", "responses"],
)
def test_transfer_parameters_that_are_no_object_are_the_clients_mistake(
    edge: ServeProcess, path: str, prompt: dict[str, Any]
) -> None:
    def refusal(**more: Any) -> str:
        content = json.dumps({"model": "hisparsed-reference", **prompt, **more})
        answer = edge.http.post(path, content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 400, answer.text
        body = answer.json()
        assert body.get("type") == ("error" if path == "/v1/messages" else None)
        return str(body["error"]["message"])

    for value in ("x", 5, 0, 0.5, [1]):
        said = refusal(vllm_xargs={"kv_transfer_params": value})
        assert f"vllm_xargs.kv_transfer_params: {value!r} is not an object" in said
    for value in ("x", 5, [1]):
        said = refusal(kv_transfer_params=value)
        assert "kv_transfer_params" in said
        assert "valid dictionary" in said
    assert "half of a character" in refusal(kv_transfer_params={"a": "\ud800"})
    legal = {"do_remote_decode": "?", "remote_block_ids": [None], "load_tiers": [{"medium": 5}]}
    for transfer in ({}, legal):
        call = {"model": "hisparsed-reference", **prompt, "kv_transfer_params": transfer}
        assert edge.http.post(path, json=call).status_code == 200


def test_every_line_of_every_process_is_json_of_one_form(edge: ServeProcess) -> None:
    # Lines of an engine's process before vLLM has set up its logging have Python's format.
    early = "Triton is installed, but doesn't include CPU backend. Disabling Triton."
    lines = [json.loads(line) for line in edge.log().splitlines() if line != early]
    assert all({"timestamp", "level", "logger", "process", "event"} <= one.keys() for one in lines)
    said = {(one["process"], one["logger"].partition(".")[0]) for one in lines}
    assert {("daemon", "hisparsed"), ("daemon", "vllm"), ("EngineCore", "vllm")} <= said
    with edge.control_http() as control:
        shown = control.get("/v1/logs", params={"limit": 2_000}).json()["lines"]
    assert {one["source"] for one in shown} == {"daemon", "engine"}
    assert all("event_id" in one for one in lines if one["logger"].partition(".")[0] == "hisparsed")


def test_a_trace_goes_on_in_the_engine(edge: ServeProcess, collector: OtlpCollector) -> None:
    header = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
    answer = edge.http.post(COMPLETIONS, json=call("a short one", 2), headers=header)
    assert answer.status_code == 200
    until(
        "a span of the caller's trace",
        lambda: any(bytes.fromhex(TRACE) in body for body in collector.bodies),
    )


@pytest.mark.parametrize(
    "path",
    [
        "/collective_rpc",
        "/sleep",
        "/server_info",
        "/reset_prefix_cache",
        "/update_weights",
        "/abort_requests",
        "/inference/v1/abort_requests",
        "/scale_elastic_ep",
        "/kv_event_sources",
        "/start_profile",
        "/v1/load_lora_adapter",
    ],
)
def test_what_is_for_developers_is_not_served(edge: ServeProcess, path: str) -> None:
    for method in ("GET", "POST"):
        assert edge.http.request(method, path, json={}).status_code == 404


def test_the_key_is_asked_for_on_all_paths_but_those_about_health(edge: ServeProcess) -> None:
    with httpx.Client(base_url=edge.url) as stranger:
        for path in ("/health", "/ping", "/metrics", "/version", "/load"):
            assert stranger.get(path).status_code == 200, path
        for path in ("/v1/models", "/docs", "/openapi.json", "/tokenize", "/collective_rpc", "/x"):
            assert stranger.get(path).status_code == 401, path
    assert edge.http.get("/openapi.json").status_code == 200


MESSAGE = {
    "model": "hisparsed-reference",
    "messages": [{"role": "user", "content": "a"}],
    "max_tokens": 2,
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-api-key", KEY.encode()),
        ("x-api-key", ACCENTED.encode()),
        ("authorization", b"Bearer " + KEY.encode()),
        ("authorization", b"bearer  \t" + KEY.encode()),
        ("authorization", b"Bearer " + ACCENTED.encode()),
        ("authorization", b"Bearer " + ACCENTED.encode("latin-1")),
    ],
)
def test_a_key_opens_the_whole_node(edge: ServeProcess, name: str, value: bytes) -> None:
    with httpx.Client(base_url=edge.url, headers={name.encode(): value}) as http:
        answer = http.post("/v1/messages", json=MESSAGE, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["type"] == "message"
        if name == "authorization":
            assert http.get("/v1/models").status_code == 200


@pytest.mark.parametrize("key", ["another", COMMENT, OTHER_KEY])
def test_what_is_no_key_is_refused_in_the_form_of_the_api(edge: ServeProcess, key: str) -> None:
    with httpx.Client(base_url=edge.url, headers={"x-api-key": key}) as http:
        answer = http.post("/v1/messages", json=MESSAGE)
        assert answer.status_code == 401
        assert answer.json()["type"] == "error"
        assert answer.json()["error"]["type"] == "authentication_error"
    with httpx.Client(base_url=edge.url, headers={"authorization": f"Bearer {key}"}) as http:
        answer = http.post(COMPLETIONS, json=call("a", 2))
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == 401


@pytest.mark.parametrize("path", ["/tokenize", "/v1/embeddings", "/v1/messages/count_tokens"])
def test_a_body_beyond_the_bound_is_refused_on_every_path(edge: ServeProcess, path: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", edge.files.port, timeout=20)
    connection.putrequest("POST", path)
    connection.putheader("authorization", f"Bearer {KEY}")
    connection.putheader("content-length", str(65 * 2**20))
    connection.endheaders()
    assert connection.getresponse().status == 413, "before the body was sent"
    connection.close()


def modes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): f"{path.stat().st_mode & 0o777:o}"
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_nobody_else_reads_the_state_folder(edge: ServeProcess) -> None:
    state = edge.files.state_dir
    assert state.stat().st_mode & 0o007 == 0
    assert {name: mode for name, mode in modes(state).items() if mode[-1] != "0"} == {}
    assert f"{edge.files.socket.stat().st_mode & 0o777:o}" == "660"


def chatted(edge: ServeProcess, **more: Any) -> dict[str, Any]:
    call = {
        "model": "hisparsed-reference",
        "messages": [{"role": "user", "content": SAID}],
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        **more,
    }
    answer = edge.http.post("/v1/chat/completions", json=call)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def test_the_chat_template_makes_the_prompt(edge: ServeProcess) -> None:
    # The reference model has a token a byte; its own template has special tokens around.
    assert chatted(edge)["usage"]["prompt_tokens"] == len(SAID) + 1


def test_the_tool_parser_reads_calls_and_the_reasoning_parser_what_comes_before(
    edge: ServeProcess,
) -> None:
    plain = chatted(edge)["choices"][0]["message"]
    with_tools = chatted(edge, tools=TOOLS)["choices"][0]
    assert plain["reasoning"]
    assert not plain.get("tool_calls")
    (call,) = with_tools["message"]["tool_calls"]
    assert call["function"] == {"name": "say", "arguments": plain["content"]}
    assert with_tools["message"]["reasoning"] == plain["reasoning"]
    assert with_tools["finish_reason"] == "tool_calls"


def test_other_switches_count_and_prefix_hits_are_told_as_before(edge: ServeProcess) -> None:
    body = chatted(edge)
    assert body["choices"][0]["message"]["role"] == "model"
    assert "cached_tokens" in body["usage"]["prompt_tokens_details"]


def test_a_killed_daemon_takes_its_engine_along_and_another_takes_over(edge: ServeProcess) -> None:
    engine = edge.engine()
    with stream(edge.http, COMPLETIONS, {**call("orphan", 1), **LONG}) as events:
        next(events)
        edge.signal(signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            list(events)
    edge.wait()
    until("the engine core ends by itself", lambda: not is_alive(engine), timeout_s=20)
    assert edge.files.socket.exists(), "a killed daemon cannot remove its socket"

    # That it serves then is tested with test_stops.
    second = ServeProcess(edge.files, **ENVIRONMENT)
    try:
        until("it answers on the socket", lambda: pid_on(edge.files.socket) == second.pid)
        second.signal(signal.SIGTERM)
        assert second.wait(timeout_s=60) == 0, second.log_end()
    finally:
        second.kill()


def pid_on(path: Path) -> int | None:
    """Of the daemon that answers there, if one does."""
    try:
        with ControlClient(path) as client:
            return client.status().node.pid
    except UserError:
        return None


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
