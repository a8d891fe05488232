"""Reading the API's JSON without trusting that every key is there: nodes differ in version."""

from __future__ import annotations

import json
import math
from typing import Any

Document = dict[str, Any]


def dig(document: object, path: str) -> Any:
    """The value at a dotted path; ``None`` where any part of it is missing."""
    value = document
    for key in path.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value


def number(document: object, path: str) -> float | None:
    """A finite number."""
    return finite(dig(document, path))


def finite(value: object) -> float | None:
    """The value where it is a number that can be drawn."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if math.isfinite(value) else None


def text(document: object, path: str) -> str | None:
    value = dig(document, path)
    return value if isinstance(value, str) else None


def items(document: object, path: str) -> list[Document]:
    """A list of objects; anything else in it is left out."""
    value = dig(document, path)
    if not isinstance(value, list):
        return []
    return [one for one in value if isinstance(one, dict)]


def parse_object(raw: str | bytes) -> Document:
    """Raises ``ValueError`` when it is not one JSON object."""
    value = json.loads(raw)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value
