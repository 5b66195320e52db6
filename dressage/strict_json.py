"""JSON as RFC 8259 has it, from people and models: what Python takes beyond it is refused."""

import json
import math
import re
from typing import Any

MAX_DEPTH = 200
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{\]}]', re.DOTALL)


def loads(text: str, *, max_depth: int = MAX_DEPTH, doubled: bool = True) -> Any:
    """Read a text.

    Args:
        text: What was sent or written.
        max_depth: How many brackets may be open at once.
        doubled: Whether an object may have a key twice (the last one counts then).

    Raises:
        ValueError: It is not JSON, has a number that is none or too large (NaN, 1e999), a key
            twice, or more brackets within each other than are followed.
    """
    _require_shallow(text, max_depth)
    return json.loads(
        text,
        parse_constant=_refuse,
        parse_float=_finite,
        object_pairs_hook=None if doubled else _once,
    )


def _require_shallow(text: str, max_depth: int) -> None:
    """Count open brackets outside of strings, before a parser follows them."""
    if text.count("[") + text.count("{") <= max_depth:
        return
    depth = 0
    for part in _STRING_OR_BRACKET.finditer(text):
        if part.group() in "[{":
            depth += 1
            if depth > max_depth:
                raise ValueError(f"nested too deeply: more than {max_depth} levels")
        elif part.group() in "]}":
            depth -= 1


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} is there twice")
    return found


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is too large a number")
    return number


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
