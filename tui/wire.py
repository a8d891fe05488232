"""Reading the API's JSON without trusting that every key is there: nodes differ in version."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import is_dataclass
from enum import Enum
from functools import cache, partial
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

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
    """A list of objects; anything else in it is omitted."""
    value = dig(document, path)
    if not isinstance(value, list):
        return []
    return [one for one in value if isinstance(one, dict)]


_Part = TypeVar("_Part")
_Reader = Callable[[Any], Any]


def build(kind: type[_Part], document: Document) -> _Part:
    """A dataclass of figures out of JSON; names that this version does not know are omitted.

    Raises ``TypeError`` or ``ValueError`` where a part is missing or cannot be right.
    """
    whole: Any = kind
    values = {
        name: document[name] if read is None else read(document[name])
        for name, read in _readers(whole)
        if name in document
    }
    return kind(**values)


@cache
def _readers(kind: type[Any]) -> list[tuple[str, _Reader | None]]:
    """Names and what reads their values; ``None`` where JSON's own value serves."""
    return [(name, _reader(hint)) for name, hint in get_type_hints(kind).items()]


def _reader(hint: Any) -> _Reader | None:
    arguments = get_args(hint)
    if get_origin(hint) is tuple:
        one = _reader(arguments[0])
        return tuple if one is None else lambda values: tuple(map(one, values))
    if NoneType in arguments:
        inner = _reader(next(one for one in arguments if one is not NoneType))
        return None if inner is None else lambda value: None if value is None else inner(value)
    if isinstance(hint, type) and is_dataclass(hint):
        return partial(build, hint)
    return hint if isinstance(hint, type) and issubclass(hint, Enum) else None


def parse_object(raw: str | bytes) -> Document:
    """Raises ``ValueError`` when it is not one JSON object."""
    value = json.loads(raw)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value
