"""Reads the body of a call before vLLM does.

The number of answers (prompts times ``n``), the fewest tokens that its prompt can have, lone
surrogates (which vLLM answers with 500), and a chain of digests of the prompt. The next call of a
session repeats the chain of its last one and continues it. Digests only; no text is kept. The token
count is a lower bound: the exact length is judged when the call is tokenised. vLLM refuses a body
that is not a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Any

from pydantic_core import from_json

MAX_ANSWERS = 1_024
"""Calls that ask for more are refused: a client can send several calls instead."""


def answers_asked(body: bytes) -> int:
    """At least 1, also if ``body`` is not a call."""
    try:
        call = from_json(body)
    except ValueError:
        return 1
    if not isinstance(call, dict):
        return 1
    sampling = call.get("sampling_params")
    inner = sampling.get("n") if isinstance(sampling, dict) else None
    return _prompts(call) * max(_number(call.get("n")), _number(inner))


def _prompts(call: dict[str, Any]) -> int:
    """A list of numbers is one prompt in token ids, one of messages is one chat."""
    prompts = [
        len(content)
        for content in (call.get("prompt"), call.get("messages"))
        if isinstance(content, list) and content and isinstance(content[0], (str, list))
    ]
    return max(prompts, default=1)


def _number(n: Any) -> int:
    """As lenient as vLLM's own reading, which takes ``"8"`` and ``8.0`` for 8."""
    if isinstance(n, str):
        n = int(n) if n.strip().isdecimal() and len(n) < 20 else 1
    return max(1, int(n)) if isinstance(n, (int, float)) and abs(n) < 2**63 else 1


_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def lone_surrogate(body: bytes) -> str | None:
    """Where ``body`` has one, in words; ``None`` where it has none."""
    if _SURROGATE.search(body) is None:
        return None
    try:
        from_json(body)
    except ValueError as strict:
        try:
            json.loads(body)
        except (ValueError, RecursionError):
            return None
        place = str(strict).rpartition(" at ")[2]
        return (
            f"the body has half of a character (a lone surrogate) at {place}; send both halves of "
            "the pair, or remove the character"
        )
    return None


def least_tokens(body: bytes, *, chars_per_token: int | None) -> int:
    """Of the longest prompt in a request body; 0 where there is none.

    ``chars_per_token`` is the model's longest token; ``None`` if it is unknown.
    """
    try:
        call = from_json(body)
    except ValueError:
        return 0
    if not isinstance(call, dict) or call.get("truncate_prompt_tokens") is not None:
        return 0  # vLLM truncates the prompt if the call asks for it
    for key in ("messages", "prompt", "input"):
        if call.get(key) is not None:
            return _least(call[key], chars_per_token, together=key == "messages")
    return 0


def _least(content: Any, chars_per_token: int | None, *, together: bool) -> int:
    """``together``: the parts are one prompt; otherwise a list has a prompt an entry."""
    if isinstance(content, str):
        return -(-len(content) // chars_per_token) if chars_per_token else 0
    if isinstance(content, dict):
        inner = content.get("content", content.get("text"))
        return 0 if inner is None else _least(inner, chars_per_token, together=True)
    if not isinstance(content, list) or not content:
        return 0
    if all(isinstance(item, int) for item in content):
        return len(content)
    parts = [_least(item, chars_per_token, together=together) for item in content]
    # Each part is rounded up, which is too much for their sum.
    return max(0, sum(parts) - len(parts)) if together else max(parts)


_TEXT_STRETCH = 256
_TOKEN_STRETCH = 64
_DIGEST_BYTES = 16


def prompt_marks(body: bytes) -> tuple[bytes, ...]:
    """The chain of a request body of the OpenAI or Anthropic API; empty where there is none.

    A last stretch that is not full has no digest, so a prompt shorter than one has no chain.
    """
    try:
        call = from_json(body)
    except ValueError:
        return ()
    if not isinstance(call, dict):
        return ()
    beginning = [call.get(key) for key in ("model", "tools", "system", "instructions")]
    return tuple(_chain(_canonical(beginning), _pieces(call)))


def _pieces(call: dict[str, Any]) -> Iterator[bytes]:
    for key in ("messages", "prompt", "input"):
        content = call.get(key)
        if content is not None:
            return _pieces_of(content)
    return iter(())


def _pieces_of(content: Any) -> Iterator[bytes]:
    if isinstance(content, str):
        return _text_pieces(content)
    if not isinstance(content, list):
        return iter(())
    if all(isinstance(item, int) for item in content):
        return _token_pieces(content)
    if len(content) == 1 and isinstance(content[0], (str, list)):
        return _pieces_of(content[0])
    return (_canonical(item) for item in content)


def _text_pieces(text: str) -> Iterator[bytes]:
    for start in range(0, len(text) - _TEXT_STRETCH + 1, _TEXT_STRETCH):
        yield text[start : start + _TEXT_STRETCH].encode("utf-8", "surrogatepass")


def _token_pieces(tokens: list[int]) -> Iterator[bytes]:
    for start in range(0, len(tokens) - _TOKEN_STRETCH + 1, _TOKEN_STRETCH):
        yield repr(tokens[start : start + _TOKEN_STRETCH]).encode()


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _chain(beginning: bytes, pieces: Iterable[bytes]) -> Iterator[bytes]:
    digest = blake2b(beginning, digest_size=_DIGEST_BYTES).digest()
    for piece in pieces:
        digest = blake2b(digest + piece, digest_size=_DIGEST_BYTES).digest()
        yield digest
