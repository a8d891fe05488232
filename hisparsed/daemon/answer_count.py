"""How many answers one call asks for: its prompts, each so many times as ``n`` says.

vLLM makes a request of the engine of every one, before it serves anybody else. Told from the body
alone; what is no such number is vLLM's to refuse.
"""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json

MAX_ANSWERS = 1_024
"""Calls that ask for more are refused: a client can send several calls instead."""


def answers_asked(body: bytes) -> int:
    """At least 1, also where ``body`` is no call."""
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
