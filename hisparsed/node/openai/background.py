"""Responses that run in the background: open until they are answered, failed when they are cut.

vLLM keeps responses in its application, where a client asks for them by id until they are done, and
takes those in the background only where its store is switched on. They end with the application.
The latest are kept here, so that a client that asks later gets its answer, and never takes a cut
answer for a complete one.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final

from hisparsed.node.openai.errors import Refusal, Send, answer

RESPONSES_API: Final = "openai_serving_responses"
"""The attribute of vLLM's application state that holds it."""
ROOT: Final = "/v1/responses/"
MOST_KEPT = 1_000
_OPEN: Final = ("queued", "in_progress")


class BackgroundResponses:
    """``api`` is vLLM's Responses API of one engine; ``None`` where the model has none."""

    def __init__(self, api: Any) -> None:
        self._api = api

    def tasks(self) -> Mapping[str, asyncio.Task[Any]]:
        """Those that still run, by id of the response."""
        if self._api is None:
            return {}
        return {name: one for name, one in self._api.background_tasks.items() if not one.done()}

    def end(self, refusal: Refusal) -> tuple[dict[str, dict[str, Any]], set[str]]:
        """End those that are not answered. Returns all responses by id, as clients should see them,
        and the ids of the ended ones."""
        if self._api is None:
            return {}, set()
        for task in self.tasks().values():
            task.cancel()
        cut: set[str] = set()
        found: dict[str, dict[str, Any]] = {}
        for name, response in list(self._api.response_store.items())[-MOST_KEPT:]:
            error = {}
            if response.status in _OPEN:
                cut.add(name)
                response.status = "failed"
                error = {"error": {"code": "server_error", "message": refusal.message}}
            found[name] = {**response.model_dump(mode="json"), **error}
        return found, cut


class KeptResponses:
    """The answers about responses whose engine is gone; the oldest are forgotten."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def keep(self, found: Mapping[str, dict[str, Any]]) -> None:
        self._kept.update(found)
        while len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)

    async def answers(self, scope: Mapping[str, Any], send: Send) -> bool:
        """Answers the request if it is for one of them; returns whether it was."""
        if scope["method"] != "GET" or not scope["path"].startswith(ROOT):
            return False
        found = self._kept.get(scope["path"].removeprefix(ROOT))
        if found is None:
            return False
        if b"stream=true" in scope["query_string"].lower():
            kind_of_event = f"response.{found['status']}"
            event = {"type": kind_of_event, "sequence_number": 0, "response": found}
            body = f"event: {kind_of_event}\ndata: {json.dumps(event)}\n\n".encode()
            kind = b"text/event-stream"
        else:
            body, kind = json.dumps(found).encode(), b"application/json"
        await answer(send, 200, body, kind)
        return True
