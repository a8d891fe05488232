"""Reads host memory of both pools as operators type it."""

from __future__ import annotations

from pydantic_core import PydanticCustomError

from hisparsed.errors import UserError
from hisparsed.policy.units import parse_bytes

_HINT = "give a size such as 512GiB"


def parse_budget(place: str, text: str) -> int:
    """Bytes of host memory. Raises ``UserError`` naming ``place``."""
    try:
        budget = parse_bytes(text)
    except PydanticCustomError as error:
        hint = (error.context or {}).get("hint", _HINT)
        raise UserError(f"{place}: {error.message()}; {hint}") from None
    if budget == 0:
        raise UserError(f"{place}: 0 holds nothing; {_HINT}")
    return budget
