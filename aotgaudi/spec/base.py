"""The base of every value that a person writes: frozen, strict, and closed to unknown keys."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class SpecValue(BaseModel):
    """Frozen; refuses unknown keys, values of another type, and numbers that are not finite."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
