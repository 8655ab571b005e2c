"""What the sections of every config are made of."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, Strict

# Strict: YAML has integers, reals and booleans, so `layers: true` and `layers: "4"` are slips.
Count = Annotated[int, Strict(), Field(gt=0)]
Whole = Annotated[int, Strict(), Field(ge=0)]
Positive = Annotated[float, Strict(), Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Strict(), Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Strict(), Field(ge=0, lt=1)]
Flag = Annotated[bool, Strict()]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class Section(BaseModel):
    """A part of a config: frozen, and without room for keys that are not declared."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
