"""The fewest tokens that a prompt can have, told before anything is tokenised.

Text has at least its characters divided by those of the longest token; token ids are counted. A
lower bound only: the exact length is judged when the call is tokenised.
"""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json


def least_tokens(body: bytes, *, chars_per_token: int | None) -> int:
    """Of the longest prompt in a request body; 0 where there is none.

    ``chars_per_token`` is the model's longest token; ``None`` where nobody knows it.
    """
    try:
        call = from_json(body)
    except ValueError:
        return 0
    if not isinstance(call, dict) or call.get("truncate_prompt_tokens") is not None:
        return 0  # vLLM shortens what asks for it
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
    # Each part is rounded up, which all of them together need not be.
    return max(0, sum(parts) - len(parts)) if together else max(parts)
