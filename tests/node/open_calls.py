"""One call of every kind that clients make, at once; and what each client was left with.

Chat, completions, messages and responses; whole, streamed and in the background. Every answer is
the same greedy text each time, so that a whole one is known by its length in tokens.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from serve_process import ServeProcess, until

from hisparsed.engine.reference.launch import SERVED_MODEL_NAME

TOKENS = 250
WHOLE = "whole"
ERROR = "error"
GONE = "gone"
"""A response in the background that can no longer be asked for."""
ENVIRONMENT = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}
_FORMS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}
_POLL_S = 0.2
_PATIENCE_S = 120.0


@dataclass
class Seen:
    """``outcome`` is one of the three above, or what was wrong, in words."""

    kind: str
    outcome: str = ""
    parts: list[str] = field(default_factory=list)


class OpenCalls:
    """All kinds, each in its own thread; ``outcomes`` waits for their ends."""

    def __init__(self, node: ServeProcess) -> None:
        self._node = node
        self.seen = [Seen(kind) for kind in KINDS]
        self._threads = [threading.Thread(target=self._ask, args=(one,)) for one in self.seen]

    def begin(self) -> OpenCalls:
        """Returns once the engine runs all of them."""
        for one in self._threads:
            one.start()
        until(
            "all calls run",
            lambda: self._node.running() == len(KINDS) and all(one.parts for one in self._begun()),
            timeout_s=60,
        )
        return self

    def _begun(self) -> list[Seen]:
        return [one for one in self.seen if "stream" in one.kind or "background" in one.kind]

    def outcomes(self) -> dict[str, str]:
        for one in self._threads:
            one.join(_PATIENCE_S)
        return {one.kind: one.outcome or f"no end: {one.parts[-3:]}" for one in self.seen}

    def _ask(self, seen: Seen) -> None:
        try:
            with httpx.Client(base_url=self._node.url, timeout=_PATIENCE_S) as http:
                KINDS[seen.kind](http, seen)
        except httpx.HTTPError as error:
            seen.outcome = f"{type(error).__name__}: {error} after {seen.parts[-2:]}"


def _body(form: str, **options: Any) -> dict[str, Any]:
    text = f"Tell {form} of the ledger. " * 8
    body: dict[str, Any] = {"model": SERVED_MODEL_NAME, "temperature": 0, **options}
    if form == "completions":
        return {**body, "prompt": text, "max_tokens": TOKENS, "ignore_eos": True}
    if form == "responses":
        return {**body, "input": text, "max_output_tokens": TOKENS, "ignore_eos": True}
    # This API knows no ``ignore_eos``; the model continues long enough after this text.
    text = "Say 2 of the ledger. " * 8 if form == "messages" else text
    messages = [{"role": "user", "content": text}]
    body |= {"messages": messages, "max_tokens": TOKENS}
    return body if form == "messages" else {**body, "ignore_eos": True}


def _whole(form: str) -> Callable[[httpx.Client, Seen], None]:
    def ask(http: httpx.Client, seen: Seen) -> None:
        answer = http.post(_FORMS[form], json=_body(form))
        seen.outcome = _judged(form, answer.status_code, answer.json())

    return ask


def _judged(form: str, status: int, answer: dict[str, Any]) -> str:
    if status >= 500:
        kind = answer["error"]["type"]
        expected = "overloaded_error" if form == "messages" else "engine_unavailable"
        known = kind in (expected, "node_draining")
        return ERROR if known else f"{status} {answer}"
    usage = answer["usage"]
    tokens = usage.get("completion_tokens", usage.get("output_tokens"))
    if form == "responses":
        ending, good = answer["status"], ("completed", "incomplete")
    elif form == "messages":
        ending, good = answer["stop_reason"], ("max_tokens", "end_turn")
    else:
        ending, good = answer["choices"][0]["finish_reason"], ("length", "stop")
    return WHOLE if ending in good and tokens == TOKENS else f"{ending} after {tokens} tokens"


def _streamed(form: str, **options: Any) -> Callable[[httpx.Client, Seen], None]:
    def ask(http: httpx.Client, seen: Seen) -> None:
        more = {} if form == "messages" else {"stream_options": {"include_usage": True}}
        body = _body(form, stream=True, **options) | ({} if form == "responses" else more)
        with http.stream("POST", _FORMS[form], json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: "):
                    seen.parts.append(line.removeprefix("data: "))
        seen.outcome = _JUDGES[form](seen.parts)

    return ask


def _judged_openai(parts: list[str]) -> str:
    events = [json.loads(one) for one in parts if one != "[DONE]"]
    finishes = [
        choice["finish_reason"]
        for event in events
        for choice in event.get("choices", ())
        if choice.get("finish_reason")
    ]
    if "error" in events[-1]:
        return ERROR if not finishes else f"an error after {finishes}"
    tokens = events[-1]["usage"]["completion_tokens"]
    whole = parts[-1] == "[DONE]" and finishes in (["length"], ["stop"]) and tokens == TOKENS
    return WHOLE if whole else f"{finishes} after {tokens} tokens, {parts[-1]}"


def _judged_messages(parts: list[str]) -> str:
    events = [json.loads(one) for one in parts if one != "[DONE]"]
    kinds = [event["type"] for event in events]
    if "error" in kinds:
        return ERROR if kinds[-1] == "error" and "message_stop" not in kinds else f"{kinds[-3:]}"
    tokens = [event["usage"]["output_tokens"] for event in events if event.get("usage")]
    whole = kinds[-1] == "message_stop" and tokens[-1:] == [TOKENS]
    return WHOLE if whole else f"{kinds[-3:]} after {tokens} tokens"


def _judged_responses(parts: list[str]) -> str:
    events = [json.loads(one) for one in parts]
    last = events[-1]
    if last["type"] == "response.failed":
        return ERROR if last["response"]["status"] == "failed" else f"{last}"
    if last["type"] not in ("response.completed", "response.incomplete"):
        return f"{last['type']}"
    return _judged("responses", 200, last["response"])


_JUDGES = {
    "chat": _judged_openai,
    "completions": _judged_openai,
    "messages": _judged_messages,
    "responses": _judged_responses,
}


def _in_background(http: httpx.Client, seen: Seen) -> None:
    answer = http.post(_FORMS["responses"], json=_body("responses", background=True)).json()
    place = f"{_FORMS['responses']}/{answer['id']}"
    for status, found in _polled(http, place, seen):
        if status == 200 and found["status"] == "failed":
            seen.outcome = ERROR if found["error"] else "failed without an error"
            return
        if status == 200 and found["status"] not in ("queued", "in_progress"):
            seen.outcome = _judged("responses", status, found)
            return
    seen.outcome = GONE


def _polled(http: httpx.Client, place: str, seen: Seen) -> Iterator[tuple[int, dict[str, Any]]]:
    """Until it cannot be asked for any more, at most for a while."""
    end_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < end_s:
        try:
            answer = http.get(place)
        except httpx.TransportError:
            return
        found = answer.json()
        seen.parts.append(f"{answer.status_code} {found.get('status')}")
        yield answer.status_code, found
        time.sleep(_POLL_S)


KINDS: dict[str, Callable[[httpx.Client, Seen], None]] = {
    **{f"{form} whole": _whole(form) for form in _FORMS},
    **{f"{form} stream": _streamed(form) for form in _FORMS},
    "responses background": _in_background,
    "responses background stream": _streamed("responses", background=True),
}
