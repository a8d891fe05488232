"""Answers of vLLM's application in this node's words."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from hisparsed.engine.context_limit import ContextLimit
from hisparsed.node.openai.clear_answers import ClearAnswers
from hisparsed.node.openai.server import only_served


def vllms_error(message: str, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": "BadRequestError", "param": param, "code": 400}}


class Node:
    def __init__(self) -> None:
        self.limit = ContextLimit()
        self.stops = False
        self.body: Any = {}
        self.status = 400
        models = {"data": [{"id": "a", "max_model_len": 2048}], "object": "list"}
        app = Starlette(
            routes=[
                Route("/v1/completions", self.answer, methods=["POST"]),
                Route("/v1/messages", self.answer, methods=["POST"]),
                Route("/v1/models", lambda _: JSONResponse(models)),
                Route("/v1/models/a", lambda _: JSONResponse(models["data"][0])),
                Route("/v1/stream", self.stream),
            ],
            exception_handlers={
                404: lambda _, error: JSONResponse({"detail": error.detail}, 404),
                405: lambda _, error: JSONResponse({"detail": error.detail}, 405),
            },
        )
        cleared: Any = ClearAnswers(app, self.limit, lambda: self.stops)
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=cleared), base_url="http://node"
        )

    async def answer(self, request: Request) -> Response:
        await request.body()
        return JSONResponse(self.body, self.status)

    async def stream(self, _: Request) -> Response:
        async def parts() -> Any:
            yield b"data: --tool-call-parser\n\n"

        return StreamingResponse(parts(), media_type="text/event-stream")


@pytest.fixture
def node() -> Node:
    return Node()


async def test_errors_name_the_nodes_own_arguments(node: Node) -> None:
    node.body = vllms_error(
        '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
    )
    answer = await node.http.post("/v1/completions")
    assert answer.json()["error"]["message"] == (
        '"auto" tool choice requires frontend_args.enable_auto_tool_choice and '
        "frontend_args.tool_call_parser to be set"
    )
    assert int(answer.headers["content-length"]) == len(answer.content)


async def test_a_prompt_that_leaves_no_room_is_named_and_not_the_number_filled_in(
    node: Node,
) -> None:
    node.limit.model_tokens = 2048
    node.body = vllms_error(
        "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)", "max_tokens"
    )
    error = (await node.http.post("/v1/completions")).json()["error"]
    assert error["message"].startswith("This model's maximum context length is 2048 tokens.")
    assert error["param"] == "input_tokens"


@pytest.mark.parametrize("split", [0, 20, 26])
@pytest.mark.parametrize("key", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
async def test_who_asks_for_no_token_is_told_so(node: Node, key: str, split: int) -> None:
    node.limit.model_tokens = 2048
    node.body = vllms_error("max_tokens must be at least 1, got 0", "max_tokens")
    sent = json.dumps({"prompt": "x", key: 0, "model": "m"}).encode()

    async def parts() -> Any:
        yield sent[:split]
        yield sent[split:]

    error = (await node.http.post("/v1/completions", content=parts())).json()["error"]
    assert error["message"] == "max_tokens must be at least 1, got 0"


async def test_a_prompt_that_speaks_of_no_tokens_asks_for_some(node: Node) -> None:
    node.limit.model_tokens = 2048
    node.body = vllms_error("max_tokens must be at least 1, got 0", "max_tokens")
    prompt = json.dumps({"max_tokens": 0})
    error = (await node.http.post("/v1/completions", json={"prompt": prompt})).json()["error"]
    assert error["param"] == "input_tokens"


@pytest.mark.parametrize(
    ("path", "method", "status", "words"),
    [
        ("/v1/embeddings", "POST", 404, "this node does not serve POST /v1/embeddings"),
        ("/v1/completions", "GET", 405, "GET /v1/completions: Method Not Allowed"),
    ],
)
async def test_paths_that_are_not_served_answer_in_the_apis_form(
    node: Node, path: str, method: str, status: int, words: str
) -> None:
    answer = await node.http.request(method, path)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, status)
    assert error["message"] == words


async def test_and_in_anthropics_where_that_was_called(node: Node) -> None:
    answer = (await node.http.get("/v1/messages/nothing")).json()
    assert answer["type"] == "error"
    assert answer["error"]["type"] == "not_found_error"


@pytest.mark.parametrize(
    ("policy", "over", "shown"),
    [(None, "refuse", 2048), (1000, "refuse", 1000), (9000, "refuse", 2048), (1000, "wait", 2048)],
)
async def test_the_models_show_the_limit_in_force(
    node: Node, policy: int | None, over: Any, shown: int
) -> None:
    node.limit.model_tokens, node.limit.max_tokens, node.limit.over = 2048, policy, over
    listed = (await node.http.get("/v1/models")).json()
    assert listed["data"][0]["max_model_len"] == shown
    assert (await node.http.get("/v1/models/a")).json()["max_model_len"] == shown


async def test_a_node_that_stops_closes_connections_also_of_streams(node: Node) -> None:
    assert "connection" not in (await node.http.get("/v1/models")).headers
    node.stops = True
    for path in ("/v1/models", "/v1/stream"):
        assert (await node.http.get(path)).headers["connection"] == "close"


async def test_what_is_no_error_passes_as_it_comes(node: Node) -> None:
    node.status, node.body = 200, {"text": "--tool-call-parser"}
    assert (await node.http.post("/v1/completions")).json() == node.body
    assert "--tool-call-parser" in (await node.http.get("/v1/stream")).text
    node.status, node.body = 400, ["--tool-call-parser"]
    assert (await node.http.post("/v1/completions")).json() == node.body


def test_the_openapi_document_has_only_what_is_served() -> None:
    schema = {"openapi": "3.1.0", "paths": {"/v1/models": {}, "/sleep": {}, "/v1/models/{a}": {}}}
    assert json.loads(json.dumps(only_served(schema)))["paths"] == {
        "/v1/models": {},
        "/v1/models/{a}": {},
    }
