"""Numbers as people and models write them, read exactly."""

import re
import unicodedata
from decimal import Decimal, InvalidOperation

CURRENCY = "$\u20ac\u00a3\u00a5\u20b9"
MINUS = "\u2212\u2012\u2013\ufe63\uff0d"  # all of them are typed where a minus is meant
SPACES = "\u00a0\u2009\u202f"  # between groups of three digits; an ordinary space parts two numbers
SUPERSCRIPTS = "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079"
VULGAR = "".join(chr(n) for n in (0xBC, 0xBD, 0xBE, *range(0x2150, 0x215F), 0x2189))

_NUMBER = re.compile(
    rf"""
    (?<![A-Za-z0-9.]) (?<![A-Za-z0-9]_)        # not inside of a word; _42_ is emphasis
    (?P<sign>[-+]?) [{CURRENCY}]? (?P<inner>[-+]?)
    (?:
        (?<!/) (?P<mixed>\d+\ )? (?P<above>\d+)/(?P<below>\d+) (?![\d/])
      | (?P<whole>\d*) (?P<vulgar>[{VULGAR}])
      | (?P<grouped>\d{{1,3}} (?:(?P<mark>[,_'{SPACES}]) \d{{3}}) (?:(?P=mark)\d{{3}})* (?!\d))
        (?P<rest>\.\d+)?
      | (?P<plain>\d+ (?:[.,]\d+)? | \.\d+) (?P<exponent>[eE][-+]?\d{{1,6}})?
    )
    (?P<raised>[{SUPERSCRIPTS}])?
    """,
    re.VERBOSE,
)


def last_number(text: str) -> Decimal | None:
    """The last number in a text, exactly; None without one, or when it is not clear which.

    Understood: signs, currency marks, groups of three, a comma before other than three digits as a
    decimal one, exponents, fractions (also as one character), digits of every script. A power that
    is written with a raised digit is no number.

    >>> last_number("-$1,234.50")
    Decimal('-1234.50')
    """
    numbers = list(_NUMBER.finditer(_plain(text)))
    if not numbers or numbers[-1]["raised"]:
        return None
    found = numbers[-1]
    try:
        value = _value(found)
    except (InvalidOperation, ZeroDivisionError):
        return None
    return -value if "-" in (found["sign"], found["inner"]) else value


def shown(number: Decimal) -> str:
    """A number for a sentence."""
    text = f"{number:f}" if abs(number.adjusted()) < 30 else f"{number:e}"
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text


def _value(found: re.Match[str]) -> Decimal:
    if found["below"]:
        return Decimal(found["mixed"] or 0) + Decimal(found["above"]) / Decimal(found["below"])
    if found["vulgar"]:
        return Decimal(found["whole"] or 0) + Decimal(str(unicodedata.numeric(found["vulgar"])))
    if found["grouped"]:
        return Decimal(re.sub(rf"[,_'{SPACES}]", "", found["grouped"]) + (found["rest"] or ""))
    return Decimal(found["plain"].replace(",", ".") + (found["exponent"] or ""))


def _plain(text: str) -> str:
    """ASCII digits, dots and signs for those of other scripts; nothing else is changed."""
    return "".join(
        "-"
        if character in MINUS
        else str(unicodedata.decimal(character))
        if not character.isascii() and unicodedata.decimal(character, None) is not None
        else {"\uff0e": ".", "\uff0c": ",", "\uff0b": "+"}.get(character, character)
        for character in text
    )
