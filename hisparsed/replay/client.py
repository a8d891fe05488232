"""Talks to an OpenAI endpoint: asks what it serves, sends calls, measures their streams.

A 429 or 503 is retried after the server's Retry-After or after a growing pause, a refused
connection a few times. Any other failure becomes a result with an error kind, never an exception.
A wrong address or an unknown model raises ``UserError``. Knows server-sent events, the OpenAI
completion chunk, and vLLM's `token_ids`. The clock is passed in, so tests need not wait.
"""

import asyncio
import json
import re
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from hashlib import blake2b
from typing import Any, Literal, Protocol

import httpx

from hisparsed.errors import UserError
from hisparsed.replay.results import CallResult


class Clock(Protocol):
    """Seconds since some fixed moment, and a pause."""

    def now(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class BrokenStreamError(Exception):
    """The stream is not a complete completion; `kind` goes into the error counts."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


class CompletionStream:
    """State of one stream; feed it every line, then call `finish`."""

    def __init__(self) -> None:
        self.first_token_at: float | None = None
        self.gaps_s: list[float] = []
        self.prefix_hit_tokens: int | None = None
        self.prompt_tokens: int | None = None
        self._last_token_at = 0.0
        self._completion_tokens: int | None = None
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._ended = False

    def line(self, text: str, now: float) -> None:
        """Take one line that arrived at `now`; raises BrokenStreamError for what is no chunk."""
        if not text.startswith("data:"):
            return
        data = text[len("data:") :].strip()
        if data == "[DONE]":
            self._ended = True
            return
        try:
            chunk = json.loads(data)
        except json.JSONDecodeError as error:
            raise BrokenStreamError("broken_stream", f"chunk is not JSON: {data:.80}") from error
        if not isinstance(chunk, dict):
            raise BrokenStreamError("broken_stream", f"chunk is not an object: {data:.80}")
        if "error" in chunk:
            raise BrokenStreamError("stream_error", f"{chunk['error']}"[:200])
        for choice in chunk.get("choices") or []:
            self._choice(choice, now)
        if chunk.get("usage"):
            self._usage(chunk["usage"])

    def finish(self) -> None:
        """Raises BrokenStreamError unless the stream came to its proper end with some output."""
        if not self._ended:
            raise BrokenStreamError("broken_stream", "the stream ended without [DONE]")
        if self.first_token_at is None:
            raise BrokenStreamError("broken_stream", "the stream has no output")

    @property
    def completion_tokens(self) -> int:
        """Output tokens by the server's count, else as seen in the stream."""
        if self._completion_tokens is not None:
            return self._completion_tokens
        return len(self._token_ids) or len(self._text)

    @property
    def digest_of(self) -> Literal["tokens", "text"]:
        """What the digest stands for."""
        return "tokens" if self._token_ids else "text"

    @property
    def digest(self) -> str:
        """A hash of the whole output."""
        output = json.dumps(self._token_ids) if self._token_ids else "".join(self._text)
        return blake2b(output.encode(), digest_size=16).hexdigest()

    def _choice(self, choice: dict[str, Any], now: float) -> None:
        text, token_ids = choice.get("text") or "", choice.get("token_ids") or []
        if not text and not token_ids:
            return
        if self.first_token_at is None:
            self.first_token_at = now
        else:
            self.gaps_s.append(now - self._last_token_at)
        self._last_token_at = now
        self._token_ids.extend(token_ids)
        self._text.append(text)

    def _usage(self, usage: dict[str, Any]) -> None:
        self.prompt_tokens = usage.get("prompt_tokens")
        self._completion_tokens = usage.get("completion_tokens")
        details = usage.get("prompt_tokens_details") or {}
        self.prefix_hit_tokens = details.get("cached_tokens", self.prefix_hit_tokens)


SESSION_HEADER = "x-hisparsed-session"
PromptFormat = Literal["ids", "text"]

_BUSY_STATUSES = (429, 503)
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """How calls are sent. `timeout_s` bounds one attempt.

    Format `ids` sends token ids and the extensions `ignore_eos` and `return_token_ids`; `text`
    sends only fields every OpenAI endpoint knows.
    """

    model: str
    prompt_format: PromptFormat = "ids"
    timeout_s: float = 600.0
    busy_retries: int = 50
    connect_retries: int = 3


@dataclass(frozen=True, slots=True)
class OutgoingCall:
    """One call ready to send."""

    session_id: str
    call_index: int
    prompt: list[int] | str
    prompt_tokens: int
    max_tokens: int


class _AttemptError(Exception):
    def __init__(self, kind: str, detail: str, pause_s: float | None = None) -> None:
        super().__init__(detail)
        self.kind = kind
        self.pause_s = pause_s


class CompletionClient:
    """Sends calls over one `httpx.AsyncClient` whose base URL is the endpoint."""

    def __init__(
        self, http: httpx.AsyncClient, clock: Clock, settings: RequestSettings, origin_s: float
    ) -> None:
        self._http = http
        self._clock = clock
        self._settings = settings
        self._origin_s = origin_s

    async def complete(self, call: OutgoingCall) -> CallResult:
        """Send `call`, with retries, and return what came back."""
        started = self._clock.now()
        retries, waited_s = 0, 0.0
        while True:
            stream = CompletionStream()
            try:
                await self._attempt(call, stream)
            except _AttemptError as error:
                if retries < self._retries_for(error.kind):
                    pause_s = _pause_s(retries) if error.pause_s is None else error.pause_s
                    await self._clock.sleep(pause_s)
                    retries, waited_s = retries + 1, waited_s + pause_s
                    continue
                return self._result(call, stream, started, retries, waited_s, error)
            return self._result(call, stream, started, retries, waited_s, None)

    def _retries_for(self, kind: str) -> int:
        if kind == "connect":
            return self._settings.connect_retries
        busy = kind in {f"http_{status}" for status in _BUSY_STATUSES}
        return self._settings.busy_retries if busy else 0

    async def _attempt(self, call: OutgoingCall, stream: CompletionStream) -> None:
        body, headers = self._body(call), {SESSION_HEADER: call.session_id}
        give_up_at = self._clock.now() + self._settings.timeout_s
        try:
            async with self._http.stream(
                "POST", "/v1/completions", json=body, headers=headers
            ) as response:
                if response.status_code != httpx.codes.OK:
                    raise await _refusal(response)
                async for line in response.aiter_lines():
                    now = self._clock.now()
                    if now > give_up_at:
                        raise _AttemptError("timeout", f"longer than {self._settings.timeout_s} s")
                    stream.line(line, now)
            stream.finish()
        except BrokenStreamError as error:
            raise _AttemptError(error.kind, str(error)) from error
        except httpx.ConnectError as error:
            raise _AttemptError("connect", str(error)) from error
        except httpx.TimeoutException as error:
            raise _AttemptError("timeout", type(error).__name__) from error
        except httpx.TransportError as error:
            raise _AttemptError("broken_stream", f"{type(error).__name__}: {error}") from error

    def _body(self, call: OutgoingCall) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._settings.model,
            "prompt": call.prompt,
            "max_tokens": call.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._settings.prompt_format == "ids":
            body |= {"ignore_eos": True, "return_token_ids": True}
        return body

    def _result(
        self,
        call: OutgoingCall,
        stream: CompletionStream,
        started: float,
        retries: int,
        waited_s: float,
        error: _AttemptError | None,
    ) -> CallResult:
        first = stream.first_token_at
        return CallResult(
            session_id=call.session_id,
            call_index=call.call_index,
            error=error.kind if error else None,
            detail=str(error) if error else "",
            started_s=started - self._origin_s,
            seconds=self._clock.now() - started,
            ttft_s=None if first is None else first - started,
            itl_s=tuple(stream.gaps_s),
            prompt_tokens=stream.prompt_tokens or call.prompt_tokens,
            completion_tokens=stream.completion_tokens,
            prefix_hit_tokens=stream.prefix_hit_tokens,
            retries=retries,
            retry_wait_s=waited_s,
            digest=stream.digest,
            digest_of=stream.digest_of,
        )


def _pause_s(retries: int) -> float:
    return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(retries, 10))


async def _refusal(response: httpx.Response) -> _AttemptError:
    text = (await response.aread()).decode("utf-8", "replace")
    pause_s = retry_after_s(response.headers.get("retry-after"), datetime.now(UTC))
    return _AttemptError(f"http_{response.status_code}", text[:200], pause_s)


def retry_after_s(value: str | None, now: datetime) -> float | None:
    """Seconds a Retry-After header asks for (a number or an HTTP date), None if it says nothing."""
    if value is None:
        return None
    if value.strip().isdigit():
        return float(value)
    try:
        return max(0.0, (parsedate_to_datetime(value) - now).total_seconds())
    except (TypeError, ValueError):
        return None


_LAST_PORT = 65535
_CONNECT_TIMEOUT_S = 10.0
_METRICS_TIMEOUT_S = 10.0
_PREEMPTIONS = re.compile(r"^vllm:num_preemptions_total(?:\{.*\})? ([0-9.e+]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model of the endpoint; `max_model_len` in tokens where it says."""

    name: str
    max_model_len: int | None


def base_url(url: str) -> str:
    """`url` without a trailing slash or /v1; UserError unless it is http(s) with a host."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise _wrong_url(url) from error
    port_fits = parsed.port is None or 0 < parsed.port <= _LAST_PORT
    if parsed.scheme not in ("http", "https") or not parsed.host or not port_fits:
        raise _wrong_url(url)
    return url.rstrip("/").removesuffix("/v1")


def _wrong_url(url: str) -> UserError:
    return UserError(f"--url: {url!r} is not right; need an address such as http://127.0.0.1:8000")


def http_client(
    url: str,
    timeout_s: float,
    api_key: str | None = None,
    transport: httpx.AsyncBaseTransport | None = None,
) -> httpx.AsyncClient:
    """A client for `url` with no limit on connections; `timeout_s` bounds one silence."""
    # With its own transport the client ignores proxy variables, which would be measured too.
    return httpx.AsyncClient(
        base_url=base_url(url),
        headers={"authorization": f"Bearer {api_key}"} if api_key else None,
        timeout=httpx.Timeout(timeout_s, connect=_CONNECT_TIMEOUT_S, pool=None),
        transport=transport
        or httpx.AsyncHTTPTransport(
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None)
        ),
    )


async def served_model(http: httpx.AsyncClient, wanted: str | None) -> ServedModel:
    """The model `wanted`, or the endpoint's first one; UserError says what is there instead."""
    models = await _models(http)
    if wanted is None:
        return models[0]
    for model in models:
        if model.name == wanted:
            return model
    names = ", ".join(model.name for model in models)
    raise UserError(f"--model: {wanted!r} is not served by {http.base_url}; it serves {names}")


async def _models(http: httpx.AsyncClient) -> list[ServedModel]:
    try:
        response = await http.get("/v1/models")
    except httpx.TransportError as error:
        reason = str(error) or type(error).__name__
        raise UserError(
            f"--url: nothing answers at {http.base_url} ({reason}); start a node with "
            "`hisparsed serve --config etc/hisparsed.yaml`, or name another address"
        ) from error
    if response.status_code != httpx.codes.OK:
        raise UserError(
            f"--url: {http.base_url}/v1/models answered {response.status_code}; need the address "
            "of an OpenAI endpoint (and its key in HISPARSED_API_KEY if it asks for one)"
        )
    try:
        cards = response.json()["data"]
        models = [ServedModel(str(card["id"]), card.get("max_model_len")) for card in cards]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"--url: {http.base_url}/v1/models is not a list of models") from error
    if not models:
        raise UserError(f"--url: {http.base_url} serves no model; start it with one")
    return models


async def read_preemptions(http: httpx.AsyncClient) -> int | None:
    """The endpoint's count of preempted requests, None where its metrics are not to be had."""
    try:
        response = await http.get("/metrics", timeout=_METRICS_TIMEOUT_S)
    except httpx.TransportError:
        return None
    if response.status_code != httpx.codes.OK:
        return None
    values = _PREEMPTIONS.findall(response.text)
    return round(sum(float(value) for value in values)) if values else None
