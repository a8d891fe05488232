"""Tells sessions apart by what their prompts begin with, before anything is tokenised.

A prompt becomes a chain of digests, each of them covering all before it: one a message of a
chat, one a stretch of a text or of token ids. The next call of a session repeats the chain
of its last one and goes on. Digests only; no text is kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Any

from pydantic_core import from_json

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
