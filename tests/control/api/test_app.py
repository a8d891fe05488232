"""The API over ASGI: documents, filters, changes and refusals."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from hisparsed.control.status.document import Lifecycle, Status
from hisparsed.engine.port import EngineGone, ServingCounters


@pytest.fixture
async def http(node: Any) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=node.api.application())
    async with httpx.AsyncClient(transport=transport, base_url="http://node") as client:
        yield client


def refusal(response: httpx.Response) -> tuple[int, str]:
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"code", "message"}
    return response.status_code, body["error"]["code"]


async def test_status_before_the_engine_reports(node: Any, http: httpx.AsyncClient) -> None:
    node.lifecycle = Lifecycle.STARTING
    status = Status.model_validate((await http.get("/v1/status")).json())
    assert status.lifecycle is Lifecycle.STARTING
    assert status.observed is None
    assert refusal(await http.get("/readyz")) == (503, "not_ready")
    assert (await http.get("/healthz")).status_code == 200


async def test_status_of_a_running_node(node: Any, http: httpx.AsyncClient) -> None:
    node.engine.counters = ServingCounters(
        prompt_tokens=900,
        prefix_query_tokens=900,
        prefix_hit_tokens=600,
        ttft_sum_s=3,
        ttft_count=4,
    )
    await node.loop.start()
    await node.ticks(1)
    node.clock.now_s += 1
    status = Status.model_validate((await http.get("/v1/status")).json())
    observed, derived = status.observed, status.derived
    assert observed is not None
    assert derived is not None
    block = 16 * 5_120
    assert derived.pools.hisparse.capacity_bytes == 900 * block
    assert derived.pools.offload.capacity_bytes == 100 * block
    assert derived.pools.offload.in_use_bytes == 10 * 16 * 256
    assert derived.pools.hisparse.reach_tokens == 900 * 16
    assert observed.report_age_s == 2.0
    assert derived.mean_ttft_s == 0.75
    assert derived.mean_itl_s is None
    assert observed.requests.mixed == 1
    assert (await http.get("/readyz")).status_code == 200


async def test_readiness_follows_the_lifecycle(node: Any, http: httpx.AsyncClient) -> None:
    await node.loop.start()
    await node.ticks(1)
    node.lifecycle = Lifecycle.DRAINING
    assert refusal(await http.get("/readyz")) == (503, "not_ready")
    assert (await http.get("/healthz")).status_code == 200
    node.engine.report_trouble = [EngineGone("gone")]
    with pytest.raises(EngineGone):
        await node.loop.tick()
    assert (await http.get("/healthz")).status_code == 200, "another engine may come"
    node.lifecycle = Lifecycle.ENGINE_GONE
    assert refusal(await http.get("/healthz")) == (503, "engine_gone")
    assert refusal(await http.get("/readyz")) == (503, "not_ready")


async def test_decisions_are_filtered(node: Any, http: httpx.AsyncClient) -> None:
    await node.loop.start()
    node.engine.target = 10
    await node.ticks(6)

    async def ask(query: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await http.get(f"/v1/decisions?{query}")).json()["decisions"]
        return found

    assert len(await ask("limit=1000")) == 24
    assert [one["tick"] for one in await ask("limit=3&lever=split")] == [6, 5, 4]
    moves = await ask("code=OffloadShortOfReach")
    assert moves
    assert all(one["acts"] and one["lever"] == "split" for one in moves)
    since = node.clock.wall() - 2
    assert {one["tick"] for one in await ask(f"since={since}")} == {5, 6}
    notable = await ask("notable=true&limit=1000")
    assert 4 <= len(notable) < 24


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "lever=brakes", "sinse=3", "since=x"])
async def test_bad_queries_name_the_key(http: httpx.AsyncClient, query: str) -> None:
    response = await http.get(f"/v1/decisions?{query}")
    assert refusal(response) == (400, "bad_query")
    assert query.split("=", maxsplit=1)[0] in response.json()["error"]["message"]


async def test_reload_tells_what_came_of_it(node: Any, http: httpx.AsyncClient) -> None:
    asked = {"actor": "ann"}
    unchanged = (await http.post("/v1/policy/reload", json=asked)).json()
    assert (unchanged["outcome"], unchanged["generation"]) == ("unchanged", 1)
    node.policy_path.write_text("version: 1\ntick: 2s\n")
    loaded = (await http.post("/v1/policy/reload", json=asked)).json()
    assert (loaded["outcome"], loaded["generation"]) == ("loaded", 2)
    node.policy_path.write_text("version: 1\ntick: soon\n")
    rejected = await http.post("/v1/policy/reload", json=asked)
    assert refusal(rejected) == (422, "policy_rejected")
    assert "policy.yaml:2: tick" in rejected.json()["error"]["message"]
    policy = (await http.get("/v1/policy")).json()
    assert policy["generation"] == 2
    assert policy["value"]["tick"] == 2.0
    assert policy["document"] == "version: 1\ntick: 2s\n"
    assert "policy.yaml:2" in policy["last_error"]
    events = (await http.get("/v1/journal/events")).json()["events"]
    assert [one["kind"] for one in events] == ["policy-rejected", "policy-loaded"]
    assert {one["actor"] for one in events} == {"ann"}


async def test_freeze_thaw_and_mode(http: httpx.AsyncClient) -> None:
    body = {"actor": "ann", "expected_generation": 1}
    frozen = (await http.post("/v1/freeze", json={**body, "levers": ["split"]})).json()
    assert frozen["frozen"] == ["split"]
    everything = (await http.post("/v1/freeze", json=body)).json()
    assert everything["frozen"] == ["split", "multiplier", "admission", "watermark"]
    assert (await http.post("/v1/thaw", json=body)).json()["frozen"] == []
    mode = (await http.post("/v1/mode", json={**body, "mode": "advise"})).json()
    assert set(mode["overridden"].values()) == {"advise"}
    back = (await http.post("/v1/mode", json={**body, "mode": None})).json()
    assert back["overridden"] == {}


async def test_changes_for_an_older_policy_conflict(node: Any, http: httpx.AsyncClient) -> None:
    node.policy_path.write_text("version: 1\n")
    node.operator.reload(actor="ben")
    for path, more in (
        ("/v1/freeze", {}),
        ("/v1/thaw", {}),
        ("/v1/mode", {"mode": "off"}),
        ("/v1/policy/reload", {}),
    ):
        body = {"actor": "ann", "expected_generation": 1, **more}
        assert refusal(await http.post(path, json=body)) == (409, "stale_generation")
    assert node.holds.frozen == frozenset()


async def test_a_less_cautious_mode_is_refused(node: Any, http: httpx.AsyncClient) -> None:
    node.policy_path.write_text("version: 1\nmode: advise\n")
    node.operator.reload(actor="ben")
    response = await http.post("/v1/mode", json={"actor": "ann", "mode": "act"})
    assert refusal(response) == (422, "mode_refused")


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"{", "Invalid JSON"),
        (b"{}", "actor"),
        (b'{"actor": ""}', "actor"),
        (b'{"actor": "a\\nb"}', "actor"),
        (b'{"actor": "ann", "levers": []}', "levers"),
        (b'{"actor": "ann", "levers": ["brakes"]}', "levers.0"),
        (b'{"actor": "ann", "force": true}', "force"),
    ],
)
async def test_bad_bodies_name_the_key(
    node: Any, http: httpx.AsyncClient, body: bytes, named: str
) -> None:
    response = await http.post("/v1/freeze", content=body)
    assert refusal(response) == (400, "bad_body")
    assert named in response.json()["error"]["message"]
    assert node.holds.frozen == frozenset()


async def test_unknown_paths_and_methods_are_json_too(http: httpx.AsyncClient) -> None:
    assert refusal(await http.get("/v1/nothing")) == (404, "not_found")
    assert refusal(await http.get("/v1/freeze")) == (405, "method_not_allowed")


async def test_a_mistake_of_ours_is_json_too(node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(node.current, "status", fail)
    transport = httpx.ASGITransport(app=node.api.application(), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://node") as client:
        response = await client.get("/v1/status")
    assert refusal(response) == (500, "internal")
    assert "a mistake" in response.json()["error"]["message"]
