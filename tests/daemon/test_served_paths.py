"""Which paths are served: those of the list and what is below them."""

from __future__ import annotations

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from hisparsed.daemon.served_paths import SERVED, ServedPaths, is_served


@pytest.mark.parametrize(
    "path", [*SERVED, "/v1/chat/completions/batch", "/v1/responses/resp_1/cancel"]
)
def test_calls_and_what_is_below_them_are_served(path: str) -> None:
    assert is_served(path)


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v1",
        "/v1/completions2",
        "/v1/load_lora_adapter",
        "/collective_rpc",
        "/sleep",
        "/inference/v1/abort_requests",
        "/scale_elastic_ep",
        "/static/x",
        "//v1/completions",
        "/V1/COMPLETIONS",
    ],
)
async def test_what_is_not_in_the_list_is_not_found_though_it_is_mounted(path: str) -> None:
    async def answer(request: Request) -> JSONResponse:
        raise AssertionError(f"reached {request.url.path}")

    app = Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])])
    transport = httpx.ASGITransport(app=ServedPaths(app))
    async with httpx.AsyncClient(transport=transport, base_url="http://node") as client:
        refused = await client.post(f"http://node{path}", json={})
    assert refused.status_code == 404
    assert refused.json()["error"]["type"] == "not_found"
