"""What the sections of the policy document share: their base class, and types with units.

``Section`` is frozen and refuses unknown keys. ``PoolSize`` is bytes with a unit or a share of the
host budget; the Python type distinguishes them (``int`` bytes, ``float`` share of one). Only a node
with a known budget can turn one into the other, which ``bounds`` does.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from hisparsed.policy.problems import refuse, shown
from hisparsed.policy.units import ByteSize, Duration, Fraction, format_bytes, format_fraction

PositiveDuration = Annotated[Duration, Field(gt=0)]


def _bare(annotation: Any) -> Any:
    """A type without its annotations; unchanged if it has a validator for units."""
    noted = getattr(annotation, "__metadata__", ())
    plain = noted and not any(isinstance(one, BeforeValidator) for one in noted)
    return get_args(annotation)[0] if plain else annotation


class Section(BaseModel):
    """One mapping of the document. An unknown key in it is an error.

    The string below each key is its description, in the reference page and in editors.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        serialize_by_alias=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _yes_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Or `true` would be read as 1."""
        if isinstance(value, bool) and info.field_name in cls._plain_numbers():
            raise refuse("number", f"{shown(value)} is not a number", hint="write a number")
        return value

    @classmethod
    def _plain_numbers(cls) -> frozenset[str]:
        """Keys whose values are numbers without a unit."""
        return frozenset(
            name
            for name, field in cls.model_fields.items()
            if any(
                one in (int, float) or isinstance(one, int)  # a literal
                for one in (field.annotation, *map(_bare, get_args(field.annotation)))
            )
            and not any(isinstance(one, BeforeValidator) for one in field.metadata)
        )


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


def pool_size_text(size: int | float | None) -> str:
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
