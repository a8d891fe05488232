"""Bodies with half of a character: a surrogate that is escaped without its other half.

Python's JSON takes such text and no tokenizer or transport does, so that vLLM answers 500 for one
in a stop string, an id or a parameter. What is no JSON at all is vLLM's to refuse.
"""

from __future__ import annotations

import json
import re

from pydantic_core import from_json

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def half_character(body: bytes) -> str | None:
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
            "the pair, or leave the character out"
        )
    return None
