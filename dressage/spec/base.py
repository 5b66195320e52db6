"""The model every specification derives from, and what no stored text may hold."""

import re

from pydantic import BaseModel, ConfigDict

# A NUL character as JSON writes it, and not the same six characters after a backslash of the text.
# Postgres stores no NUL.
JSON_NUL = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")


class Spec(BaseModel):
    """Immutable; an unknown field is an error, never ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class View(Spec):
    """What the service shows of a row: made from the attributes of the same names."""

    model_config = ConfigDict(from_attributes=True)
