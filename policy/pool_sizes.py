"""Pool sizes in a policy: bytes with a unit, or a share of the host budget.

The Python type tells them apart (``int`` bytes, ``float`` share of one); only a node with a
known budget can turn one into the other, which is done in ``bounds``.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import BeforeValidator, Discriminator, Tag
from pydantic_core import PydanticCustomError

from hisparsed.policy.units import ByteSize, Fraction, format_bytes, format_fraction


def size_or_share(value: object) -> str:
    """Which of ``"size"`` and ``"share"`` a value is, as written."""
    if isinstance(value, str):
        return "share" if value.strip().endswith("%") else "size"
    whole = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 1
    return "share" if whole or isinstance(value, float) else "size"


def _no_bare_percentage(value: object) -> object:
    """2 to 100 without a unit is a forgotten %, not a pool of a few bytes."""
    if isinstance(value, int) and not isinstance(value, bool) and 1 < value <= 100:
        raise PydanticCustomError(
            "size_without_unit",
            "{value} has no unit; write {value}% of the host budget, or a size such as {value}GiB",
            {"value": value},
        )
    return value


PoolSize: TypeAlias = Annotated[
    Annotated[ByteSize, Tag("size")] | Annotated[Fraction, Tag("share")],
    Discriminator(size_or_share),
    BeforeValidator(_no_bare_percentage),
]
"""``int`` bytes, or ``float`` share (0..1) of the host budget."""


def shown(size: int | float | None) -> str:
    """The size as an operator writes it."""
    if size is None:
        return "null"
    return format_fraction(size) if isinstance(size, float) else format_bytes(size)


def below(first: int | float | None, second: int | float | None) -> bool:
    """Whether both are sizes or both shares, and the first is smaller.

    A size and a share can only be compared on a node with a known budget.
    """
    if first is None or second is None or type(first) is not type(second):
        return False
    return first < second


def sum_of_shares(first: int | float | None, second: int | float | None) -> float:
    """The sum of two shares; -1 when either is a size or missing."""
    if isinstance(first, float) and isinstance(second, float):
        return first + second
    return -1.0
