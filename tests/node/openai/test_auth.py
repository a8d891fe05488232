"""The API key: asked for on every path that is not about the node's health."""

from __future__ import annotations

from hmac import compare_digest
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from hisparsed.node.openai import auth
from hisparsed.node.openai.admission import MAX_BODY_BYTES
from hisparsed.node.openai.auth import OPEN_PATHS, KeyGuard, keys_of


def client(*keys: str) -> httpx.AsyncClient:
    async def answer(request: Request) -> JSONResponse:
        return JSONResponse({"path": request.url.path})

    methods = ["GET", "POST", "OPTIONS"]
    app: Any = Starlette(routes=[Route("/{path:path}", answer, methods=methods)])
    guard = KeyGuard(app, api_keys=keys)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=guard), base_url="http://node")


@pytest.mark.parametrize(
    "path",
    ["/v1/completions", "/invocations", "/inference/v1/generate", "/scale_elastic_ep", "/tokenize"],
)
async def test_calls_without_a_key_are_refused_wherever_they_go(path: str) -> None:
    refused = await client("one", "two").post(path, json={})
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"] == "Bearer"
    assert "API key" in refused.json()["error"]["message"]


@pytest.mark.parametrize("header", ["Bearer tw", "Bearer", "two", "Basic two", "Bearer one two"])
async def test_a_wrong_key_is_no_key(header: str) -> None:
    answer = await client("one", "two").post("/invocations", headers={"Authorization": header})
    assert answer.status_code == 401


@pytest.mark.parametrize("header", ["", " ", "Bearer ", "Bearer  ", "Basic"])
async def test_an_empty_header_is_no_key(header: str) -> None:
    answer = await client("one").get("/v1/models", headers={"Authorization": header})
    assert answer.status_code == 401


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
async def test_a_key_may_have_other_letters_than_ascii(encoding: str) -> None:
    headers = {b"authorization": b"Bearer  " + "schl\u00fcssel".encode(encoding)}
    http = client("schl\u00fcssel")
    assert (await http.get("/v1/models", headers=headers)).status_code == 200
    headers = {b"x-api-key": "schl\u00fcssel".encode(encoding)}
    assert (await http.post("/v1/messages", headers=headers)).status_code == 200


def test_a_key_file_may_have_a_byte_order_mark_and_comments(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("one\n# of the second team\n\n  two  \r\n#three\n", encoding="utf-8-sig")
    environ = {"VLLM_API_KEY": "four"}
    assert keys_of(path, environ) == ("one", "two")
    assert environ == {}, "or vLLM would ask for it too"


@pytest.mark.parametrize(("value", "keys"), [("one", ("one",)), ("", ())])
def test_vllms_own_variable_is_the_key_where_there_is_no_file(
    value: str, keys: tuple[str, ...]
) -> None:
    environ = {"VLLM_API_KEY": value}
    assert keys_of(None, environ) == keys
    assert environ == {}
    assert keys_of(None, environ) == ()


@pytest.mark.parametrize("header", ["Bearer one", "bearer two", "Bearer   two ", "BEARER\tone"])
async def test_each_key_opens_every_path(header: str) -> None:
    answer = await client("one", "two").post("/invocations", headers={"Authorization": header})
    assert answer.json() == {"path": "/invocations"}


async def test_the_messages_api_takes_the_key_as_its_own_clients_send_it() -> None:
    http = client("one", "two")
    own = {"x-api-key": "two"}
    assert (await http.post("/v1/messages/count_tokens", headers=own)).status_code == 200
    # The official client sends both where both are set; one that holds is enough.
    both = {**own, "authorization": "Bearer other"}
    assert (await http.post("/v1/messages", headers=both)).status_code == 200
    wrong = await http.post("/v1/messages", headers={"x-api-key": "tw"})
    assert wrong.status_code == 401
    assert wrong.json()["error"]["type"] == "authentication_error"
    assert "x-api-key" in wrong.json()["error"]["message"]
    assert (await http.post("/v1/completions", headers=own)).status_code == 401


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
async def test_health_is_told_to_everybody(path: str) -> None:
    assert (await client("one").get(path)).status_code == 200


async def test_a_browser_may_ask_before_it_sends_a_key() -> None:
    assert (await client("one").options("/v1/completions")).status_code == 200


async def test_without_keys_everybody_passes() -> None:
    assert (await client().post("/v1/completions")).status_code == 200


async def test_a_refused_client_is_answered_when_it_has_sent_its_body() -> None:
    async def app(*_: Any) -> None:
        raise AssertionError("passed without a key")

    parts = [{"type": "http.request", "body": b"x" * 9, "more_body": more} for more in (1, 1, 0)]
    sent: list[Any] = []

    async def receive() -> Any:
        return parts.pop(0)

    async def send(message: Any) -> None:
        assert parts == [], "answered while the client was sending"
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    await KeyGuard(app, api_keys=["one"])(scope, receive, send)
    assert sent[0]["status"] == 401


async def test_every_key_is_compared_and_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(given: bytes, known: bytes) -> bool:
        compared.append((given, known))
        return compare_digest(given, known)

    monkeypatch.setattr(auth, "compare_digest", compare)
    header = {"Authorization": "Bearer one"}
    assert (await client("one", "two", "three").get("/v1/models", headers=header)).is_success
    assert len(compared) == 3
    assert {len(part) for pair in compared for part in pair} == {32}, "digests, of one length"


async def test_who_has_no_key_is_not_read_beyond_the_bound() -> None:
    taken = 0

    async def receive() -> Any:
        nonlocal taken
        taken += 1
        return {"type": "http.request", "body": b"x" * (MAX_BODY_BYTES // 4), "more_body": True}

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    guard: Any = KeyGuard(None, api_keys=["one"])  # type: ignore[arg-type]
    await guard(scope, receive, send)
    assert taken == 5
    assert sent[0]["status"] == 401
