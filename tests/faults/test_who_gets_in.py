"""In which order a client is judged: its key, its path, then the gate; and what it may not say."""

from __future__ import annotations

import logging

import pytest
from edge import SHORT, Edge

from hisparsed.control.log_privacy import without_text

KEY = "authorization: Bearer one"


@pytest.fixture
async def guarded() -> Edge:
    return Edge(SHORT, api_keys=("one",))


async def test_a_stranger_does_not_learn_which_paths_there_are(guarded: Edge) -> None:
    await guarded.start()
    for path in ("/v1/models", "/collective_rpc", "/nowhere"):
        assert (await guarded.ask(path=path)).status == 401
    assert (await guarded.ask(path="/health")).status == 200
    await guarded.stop()
    assert [path for _, path, _ in guarded.calls] == ["/health"]


async def test_who_has_a_key_reaches_the_listed_paths_alone(guarded: Edge) -> None:
    await guarded.start()
    assert (await guarded.ask(path="/v1/models", headers=(KEY,))).status == 200
    for path in ("/collective_rpc", "/v1/../sleep", "/sleep", "/%73leep"):
        refused = await guarded.ask("POST", path, headers=(KEY,), body=b"{}")
        assert (refused.status, refused.error["type"]) == (404, "not_found")
    await guarded.stop()
    assert [path for _, path, _ in guarded.calls] == ["/v1/models"]


async def test_no_answer_says_what_serves_it(guarded: Edge) -> None:
    await guarded.start()
    answer = await guarded.ask(path="/v1/models", headers=(KEY,))
    assert "server" not in answer.headers
    await guarded.stop()


async def test_what_is_logged_for_a_client_is_not_quoted(guarded: Edge) -> None:
    logged: list[str] = []

    def look() -> None:
        record = logging.LogRecord("some.library", logging.ERROR, "f", 1, "%s", ("text",), None)
        logged.append(without_text(record).getMessage())

    guarded.while_asked = look
    await guarded.start()
    await guarded.ask(path="/v1/models", headers=(KEY,))
    await guarded.stop()
    look()
    assert logged == ["<str>", "text"]
