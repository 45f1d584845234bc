"""What every block of a recipe has in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Share = Annotated[float, Field(ge=0, lt=1)]


class Block(BaseModel):
    """Base of every recipe block: unknown keys fail, values are checked, instances do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
