"""Which rollouts go through one forward pass: those of like length, so that little is padding."""

from collections.abc import Sequence
from dataclasses import dataclass

ROUND = 64  # tokens: widths of compiled passes are multiples of it


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one forward and backward pass.

    Attributes:
        rows: Their places.
        width: Tokens of each, padding included.
        height: Rows, empty ones included.
    """

    rows: tuple[int, ...]
    width: int
    height: int


def micro_batches(
    lengths: Sequence[int], tokens: int, widths: Sequence[int] = ()
) -> list[MicroBatch]:
    """Cut rows into micro-batches, the longest first, each trimmed to its own longest.

    Args:
        lengths: Tokens of each row.
        tokens: Of one micro-batch at most, padding included; a single row may have more.
        widths: Compiled passes know these widths alone, rising, and are filled up with empty rows.
    """
    order = sorted(range(len(lengths)), key=lambda at: (-lengths[at], at))
    found, at = [], 0
    while at < len(order):
        longest = lengths[order[at]]
        width = next((w for w in widths if longest <= w), longest)
        height = max(1, tokens // max(1, width))
        rows = tuple(order[at : at + height])
        found.append(MicroBatch(rows, width, height if width in widths else len(rows)))
        at += height
    return found


def compiled_widths(longest: int) -> tuple[int, ...]:
    """Few widths for rows of up to so many tokens: each costs a compilation."""
    parts = (longest * part // 8 for part in (2, 3, 4, 5, 6, 7))
    rounded = {-(-part // ROUND) * ROUND for part in parts}
    return (*sorted(width for width in rounded if width < longest), longest)
