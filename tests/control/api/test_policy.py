"""The policy over the API: what is in force and why, trying documents, values for a time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from hisparsed.policy.keys import settable_keys

SCHEDULED = """\
version: 1
hot:
  max: 4
schedules:
  - name: busy
    when: {pressure: high}
    set:
      hot.max: 3
"""


@pytest.fixture
async def http(node: Any) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=node.api.application())
    async with httpx.AsyncClient(transport=transport, base_url="http://node") as client:
        yield client


async def policy(http: httpx.AsyncClient) -> dict[str, Any]:
    answer: dict[str, Any] = (await http.get("/v1/policy")).json()
    return answer


async def set_value(http: httpx.AsyncClient, key: str, value: Any, **more: Any) -> httpx.Response:
    body = {"actor": "ann", "key": key, "value": value, "for_s": 60, **more}
    return await http.post("/v1/policy/set", json=body)


async def test_every_key_has_a_value_and_a_source(node: Any, http: httpx.AsyncClient) -> None:
    answer = await policy(http)
    assert list(answer["values"]) == list(settable_keys()) == list(answer["sources"])
    assert answer["values"]["rebalance.window"] == "3s"
    none = {"schedule": None, "actor": None, "expires_unix_s": None}
    assert answer["sources"]["tick"] == {"from": "document", "line": 3, **none}
    assert answer["sources"]["hot.max"] == {"from": "default", "line": None, **none}
    assert answer["file"] == str(node.policy_path)
    assert answer["overrides"] == answer["schedules"] == answer["pending_restart"] == []
    assert answer["rejected"] is None


async def test_a_set_value_shows_who_and_until_when(node: Any, http: httpx.AsyncClient) -> None:
    changed = (await set_value(http, "hot.max", "3")).json()
    assert changed["generation"] == 2
    assert changed["not_kept"] is None
    answer = await policy(http)
    now_s = node.clock.wall()
    assert answer["values"]["hot.max"] == "3"
    assert answer["value"]["hot"]["max"] == 3.0
    assert answer["sources"]["hot.max"] == {
        "from": "override",
        "line": None,
        "schedule": None,
        "actor": "ann",
        "expires_unix_s": now_s + 60,
    }
    (override,) = answer["overrides"]
    assert override == {
        "key": "hot.max",
        "value": 3,
        "actor": "ann",
        "set_unix_s": now_s,
        "expires_unix_s": now_s + 60,
    }


async def test_unset_goes_back_to_the_document(node: Any, http: httpx.AsyncClient) -> None:
    await set_value(http, "tick", "2s", for_s=None)
    assert (await policy(http))["values"]["tick"] == "2s"
    asked = {"actor": "ben", "key": "tick"}
    assert (await http.post("/v1/policy/unset", json=asked)).status_code == 200
    assert (await policy(http))["values"]["tick"] == "1s"
    again = await http.post("/v1/policy/unset", json=asked)
    assert again.status_code == 422
    assert again.json()["error"]["code"] == "not_set"
    events = (await http.get("/v1/journal/events")).json()["events"]
    assert [(one["kind"], one["actor"]) for one in events[:2]] == [
        ("value-unset", "ben"),
        ("value-set", "ann"),
    ]


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("hot.max", "0.5", "0.5 is too small; write 1 or more"),
        ("hot.mx", "3", "hot.mx: is not a known key; did you mean hot.max?"),
        ("hot", "3", "hot: is a section; set its keys, such as hot.min"),
        ("schedules", "3", "can only be changed in the document"),
        ("version", "2", "can only be changed in the document"),
        ("tick", "soon", 'tick: "soon" is not a time'),
        ("pools.offload.floor", 20, "20 has no unit"),
    ],
)
async def test_a_bad_value_is_refused_and_changes_nothing(
    node: Any, http: httpx.AsyncClient, key: str, value: Any, says: str
) -> None:
    before = await policy(http)
    refused = await set_value(http, key, value)
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "value_refused")
    assert says in refused.json()["error"]["message"]
    assert await policy(http) == before


@pytest.mark.parametrize("for_s", [0, -1, "x"])
async def test_a_time_must_be_positive(http: httpx.AsyncClient, for_s: Any) -> None:
    assert (await set_value(http, "tick", "2s", for_s=for_s)).status_code == 400


@pytest.mark.parametrize("for_s", [366 * 86_400 + 1, 1e300])
async def test_what_no_calendar_reaches_is_refused(
    node: Any, http: httpx.AsyncClient, for_s: float
) -> None:
    refused = await set_value(http, "hot.max", "3", for_s=for_s)
    assert refused.status_code == 400
    assert "at most 31622400 seconds (366d)" in refused.json()["error"]["message"]
    assert node.source.overrides == ()
    assert (await set_value(http, "hot.max", "3", for_s=366 * 86_400)).status_code == 200


async def test_how_long_must_be_said(http: httpx.AsyncClient) -> None:
    body = {"actor": "ann", "key": "tick", "value": "2s"}
    refused = await http.post("/v1/policy/set", json=body)
    assert refused.status_code == 400
    assert "for_s" in refused.json()["error"]["message"]


async def test_set_honours_the_expected_generation(http: httpx.AsyncClient) -> None:
    await set_value(http, "tick", "2s")
    late = await set_value(http, "tick", "3s", expected_generation=1)
    assert late.status_code == 409
    assert (await policy(http))["values"]["tick"] == "2s"


@pytest.mark.parametrize("path", ["check", "diff"])
async def test_trying_a_document_says_what_it_would_change(
    node: Any, http: httpx.AsyncClient, path: str
) -> None:
    text = node.policy_path.read_text().replace("tick: 1s", "tick: 2s")
    text += "schedules: [{name: busy, when: {pressure: high}, set: {tick: 3s}}]\n"
    text = text.replace("stale_after: 5s", "stale_after: 6s")
    answer = (await http.post(f"/v1/policy/{path}", json={"document": text})).json()
    assert (answer["ok"], answer["problems"]) == (True, [])
    assert [one["key"] for one in answer["changes"]] == ["tick", "stale_after", "schedules.busy"]
    assert answer["changes"][0] == {"key": "tick", "active": "1s", "new": "2s"}
    assert answer["changes"][2]["active"] is None
    assert (await policy(http))["generation"] == 1


async def test_trying_a_document_counts_this_nodes_sizes(
    node: Any, http: httpx.AsyncClient
) -> None:
    await node.loop.start()
    text = "version: 1\nhot:\n  min: 8\n  max: 9\n  start: 8\n"
    answer = (await http.post("/v1/policy/check", json={"document": text})).json()
    assert not answer["ok"]
    (problem,) = answer["problems"]
    assert (problem["line"], problem["key"]) == (3, "")
    assert "this node can lease at most 4" in problem["message"]


async def test_a_rejected_reload_is_shown_with_who_and_when(
    node: Any, http: httpx.AsyncClient
) -> None:
    node.policy_path.write_text("version: 1\ntick: soon\n")
    await http.post("/v1/policy/reload", json={"actor": "ann"})
    rejected = (await policy(http))["rejected"]
    assert (rejected["actor"], rejected["at_unix_s"]) == ("ann", node.clock.wall())
    assert "policy.yaml:2: tick" in rejected["error"]


async def test_active_schedules_are_named(make_node: Any) -> None:
    node = make_node(SCHEDULED)
    await node.loop.start()
    node.engine.live_set_tokens = 10**9
    await node.ticks(2)
    transport = httpx.ASGITransport(app=node.api.application())
    async with httpx.AsyncClient(transport=transport, base_url="http://node") as client:
        answer = await policy(client)
    assert answer["schedules"] == [{"name": "busy", "active": True}]
    assert answer["values"]["hot.max"] == "3"
    source = answer["sources"]["hot.max"]
    assert (source["from"], source["line"], source["schedule"]) == ("schedule", 8, "busy")


async def test_a_mode_set_over_the_api_is_a_source(http: httpx.AsyncClient) -> None:
    body = {"actor": "ann", "levers": ["split"], "mode": "advise"}
    assert (await http.post("/v1/mode", json=body)).status_code == 200
    answer = await policy(http)
    assert answer["values"]["levers.split.mode"] == "advise"
    source = answer["sources"]["levers.split.mode"]
    assert (source["from"], source["actor"]) == ("override", "ann")


async def test_unset_of_a_mode_says_what_sets_it_back(http: httpx.AsyncClient) -> None:
    await http.post("/v1/mode", json={"actor": "ann", "levers": ["split"], "mode": "off"})
    body = {"actor": "ann", "key": "levers.split.mode"}
    refused = await http.post("/v1/policy/unset", json=body)
    assert "`hisparsed mode policy` sets the mode" in refused.json()["error"]["message"]


async def test_a_value_that_needs_a_restart_is_told(node: Any, http: httpx.AsyncClient) -> None:
    await node.loop.start()
    assert (await policy(http))["pending_restart"] == []
    await set_value(http, "hot.max", 9)
    pending = [{"key": "hot.max", "running": "4", "wanted": "9"}]
    assert (await policy(http))["pending_restart"] == pending
    status = (await http.get("/v1/status")).json()
    assert status["policy"]["pending_restart"] == pending


async def test_the_schema_is_served(http: httpx.AsyncClient) -> None:
    schema = (await http.get("/v1/policy/schema")).json()
    assert "hot" in schema["properties"]
