"""Every interval that Dressage shows: 95 %, honest for few cases, never outside what can be.

Which method, and why: `bench/coverage.py` prints how often each holds the true value.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev

FEWEST_PASSES, FEWEST_REWARDS = 5, 20  # cases, below which no interval is given
FEW_PASSES, FEW_REWARDS = 10, 100  # below which one is wider than it would have to be
NORMAL = 1.959964
# 97.5 % points of Student's t by degrees of freedom; the normal one beyond.
T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True)
class Difference:
    """A mean paired difference over cases.

    Attributes:
        before: Mean of the first numbers.
        after: Mean of the second ones.
        difference: After less before.
        low: Lower end of the interval; None: too few cases for one.
        high: Upper end.
        count: Cases.
        few: Too few cases: there is no interval, or it holds the true value more often than in
            95 % of all samples.
    """

    before: float
    after: float
    difference: float
    low: float | None
    high: float | None
    count: int
    few: bool


def paired_passes(before: Mapping[str, bool], after: Mapping[str, bool]) -> Difference | None:
    """Difference of two pass rates over the cases that both have; None: there is no such case.

    The Wald interval with one more case that became better and one more that became worse (Bonett &
    Price 2012, Adjusted Wald Confidence Interval for a Difference of Binomial Proportions Based on
    Paired Data). It is never of width 0, and covers at least 93 % from 5 cases on. A case counts
    once, however many rollouts it has had: give means of clusters to `paired_rewards`.
    """
    common = sorted(before.keys() & after.keys())
    if not common:
        return None
    better = sum(after[case] and not before[case] for case in common)
    worse = sum(before[case] and not after[case] for case in common)
    count = len(common)
    up, down = (better + 1) / (count + 2), (worse + 1) / (count + 2)
    variance = up + down - (up - down) ** 2
    half = NORMAL * sqrt(variance / (count + 2))
    enough = count >= FEWEST_PASSES
    return Difference(
        before=fmean(before[case] for case in common),
        after=fmean(after[case] for case in common),
        difference=(better - worse) / count,
        low=max(-1.0, up - down - half) if enough else None,
        high=min(1.0, up - down + half) if enough else None,
        count=count,
        few=count * variance < FEW_PASSES,
    )


def paired_rewards(before: Mapping[str, float], after: Mapping[str, float]) -> Difference | None:
    """Mean difference of numbers of any size over the cases that both have.

    Student's t on the differences, with one more case that became better by half of the range of
    all numbers, and one that became worse by as much: rewards often take few values, and equal
    differences say nothing of those not seen. None when no case is in both; no interval below 20
    cases, or when all numbers are one and the same.
    """
    common = sorted(before.keys() & after.keys())
    if not common:
        return None
    differences = [after[case] - before[case] for case in common]
    numbers = [value for case in common for value in (before[case], after[case])]
    half_range = max(numbers) / 2 - min(numbers) / 2
    padded = [*differences, half_range, -half_range]
    count, middle = len(common), fmean(padded)
    deviation = sqrt(fmean((value - middle) ** 2 for value in padded))
    half = _t(count - 1) * deviation / sqrt(len(padded)) if count > 1 else 0.0
    enough = count >= FEWEST_REWARDS and half_range > 0
    return Difference(
        before=fmean(before[case] for case in common),
        after=fmean(after[case] for case in common),
        difference=fmean(differences),
        low=middle - half if enough else None,
        high=middle + half if enough else None,
        count=count,
        few=not enough or count < FEW_REWARDS,
    )


def of_repetitions(
    values: Sequence[float], *, within: tuple[float, float] | None = None
) -> tuple[float, float] | None:
    """Student's t interval of independent repetitions.

    Args:
        values: One a repetition.
        within: The least and the greatest value that can be.

    Returns:
        None for a single one, and for equal ones, which say nothing of how others would differ.
    """
    if len(values) < 2 or min(values) == max(values):
        return None
    mean, half = fmean(values), _t(len(values) - 1) * stdev(values) / sqrt(len(values))
    low, high = mean - half, mean + half
    return (max(low, within[0]), min(high, within[1])) if within else (low, high)


def _t(degrees: int) -> float:
    return T[degrees - 1] if degrees <= len(T) else NORMAL
