"""An OpenAI call against a node, whole or as a stream of server-sent events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from hisparsed.engine.reference.launch import SERVED_MODEL_NAME

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


def call(prompt: str, max_tokens: int, **options: Any) -> dict[str, Any]:
    """The body of a greedy completion that does not end early."""
    return {
        "model": SERVED_MODEL_NAME,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        **options,
    }


def complete(http: httpx.Client, prompt: str, max_tokens: int, **options: Any) -> dict[str, Any]:
    """The answer to a completion that must succeed."""
    response = http.post(COMPLETIONS, json=call(prompt, max_tokens, **options))
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@contextmanager
def stream(http: httpx.Client, path: str, body: dict[str, Any]) -> Iterator[Iterator[str]]:
    """The data of each event, ``[DONE]`` included; closes the connection at the end."""
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with http.stream("POST", path, json=asked) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        yield (
            line.removeprefix("data: ")
            for line in response.iter_lines()
            if line.startswith("data: ")
        )


def text_of(events: list[str]) -> str:
    """What the events of a stream generate; they must end as they should."""
    assert events[-1] == "[DONE]", events[-1]
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    return "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content", "")
        for choice in choices
    )


def usage_of(events: list[str]) -> dict[str, Any]:
    """The figures in the last event of a stream that ended as it should."""
    assert events[-1] == "[DONE]", events[-1]
    usage: dict[str, Any] = json.loads(events[-2])["usage"]
    return usage
