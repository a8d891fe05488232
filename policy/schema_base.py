"""What every section of the policy document shares: frozen, strict, and typed with units."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from hisparsed.policy.units import Duration

PositiveDuration = Annotated[Duration, Field(gt=0)]


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
