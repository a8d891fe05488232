"""What every section of the policy document shares: frozen, strict, and typed with units."""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from hisparsed.policy.problems import refuse, shown
from hisparsed.policy.units import Duration

PositiveDuration = Annotated[Duration, Field(gt=0)]


def _bare(annotation: Any) -> Any:
    """A type without what is noted on it; as it is where a unit is read first."""
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
