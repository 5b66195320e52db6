"""The model every specification derives from."""

from pydantic import BaseModel, ConfigDict


class Spec(BaseModel):
    """Immutable; an unknown field is an error, never ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid")
