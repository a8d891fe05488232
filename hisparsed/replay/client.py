"""Sends one call to an OpenAI completions endpoint and measures it, retrying where asked to.

A 429 or 503 is retried after the server's Retry-After, or after a growing pause; a refused
connection a few times. Any other failure becomes a result with an error kind, never an exception.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Literal

import httpx

from hisparsed.replay.clock import Clock
from hisparsed.replay.results import CallResult
from hisparsed.replay.stream import BrokenStreamError, CompletionStream

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
