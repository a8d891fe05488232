"""Follows one streamed completion: first token, gaps, usage and a digest of the output.

Sans I/O: lines and times go in, figures come out. Knows server-sent events and the OpenAI
completion chunk, and vLLM's `token_ids` where a server sends them.
"""

import json
from hashlib import blake2b
from typing import Any, Literal


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
