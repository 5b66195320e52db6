"""Regular expressions of users: what `re` accepts, run by an engine that can be stopped."""

import re
from functools import lru_cache

import regex

# What may hold a brace: names, escapes, sets, repetitions. Any other brace is itself for `re`, and
# something else for `regex` (fuzzy matching).
_PARTS = re.compile(r"\\N\{[^}]*\}|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{\d*,?\d*\}|\{", re.DOTALL)


@lru_cache(maxsize=100)
def compile_pattern(pattern: str) -> "regex.Pattern[str]":
    """A pattern whose `search` takes a `timeout` and means what it means for `re`.

    Raises:
        ValueError: It is not a regular expression; with the reason.
    """
    try:
        re.compile(pattern)
        return regex.compile(_PARTS.sub(_literal_brace, pattern))
    except (re.error, regex.error, RecursionError, OverflowError) as error:
        raise ValueError(f"not a regular expression: {error}") from None


def _literal_brace(part: re.Match[str]) -> str:
    return r"\{" if part.group() in ("{", "{}") else part.group()
