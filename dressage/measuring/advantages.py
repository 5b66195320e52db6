"""Advantages of a generation batch, in double precision, with one meaning of "no spread".

GRPO (2402.03300, section 4.1.2): a reward less the mean of its group, divided by the standard
deviation (of n - 1) and 1e-4, as `trl.GRPOTrainer` has it. TRL computes in single precision, where
rewards of 1e8 and 1e8 + 1 are one number.
"""

from collections.abc import Sequence
from itertools import chain
from statistics import fmean
from typing import Literal

EPSILON = 1e-4
TOLERANCE = 1e-12  # of the largest reward, or of 1: what adding up in another order can make


def has_no_spread(rewards: Sequence[float | None]) -> bool:
    """Whether a group has rewards that are all the same: its advantages are all zero."""
    known = [reward for reward in rewards if reward is not None]
    if len(known) < len(rewards):
        return False
    return max(known) - min(known) <= TOLERANCE * max(1.0, *map(abs, known))


def advantages_of(
    groups: Sequence[Sequence[float | None]],
    scale: Literal["group", "batch", "none"],
    *,
    everyone: Sequence[Sequence[float | None]],
) -> list[float]:
    """One advantage a rollout, group after group.

    Args:
        groups: Rewards of this process by group; None: the group has no reward and teaches nothing.
        scale: What deviations are divided by: that of the group, of the whole batch, or nothing.
        everyone: The groups of all processes.
    """
    batch = _deviation([r for group in everyone for r in group if r is not None])
    return list(chain.from_iterable(_of_group(group, scale, batch) for group in groups))


def _of_group(group: Sequence[float | None], scale: str, batch: float) -> list[float]:
    known = [reward for reward in group if reward is not None]
    if len(known) < len(group) or has_no_spread(known):
        return [0.0] * len(group)
    mean = fmean(known)
    if scale == "none":
        return [reward - mean for reward in known]
    deviation = _deviation(known) if scale == "group" else batch
    return [(reward - mean) / (deviation + EPSILON) for reward in known]


def _deviation(values: Sequence[float]) -> float:
    """Standard deviation of n - 1; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    mean = fmean(values)
    return float((sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5)
