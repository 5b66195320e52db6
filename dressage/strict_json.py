"""JSON as RFC 8259 has it, from people and models: what Python takes beyond it is refused."""

import json
import math
from typing import Any


def loads(text: str) -> Any:
    """Read a text.

    Raises:
        ValueError: It is not JSON, has a number that is none or too large (NaN, 1e999), or is
            nested deeper than we can follow.
    """
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is too large a number")
    return number


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
