"""The table of a sweep: means over repetitions, with intervals."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from math import sqrt
from statistics import fmean, stdev
from typing import Any

from app.db.models import JobRow
from dressage.spec.sweep import SEED, Interval, SweepArm

# 97.5 % points of Student's t by degrees of freedom; the normal one beyond.
T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
NORMAL = 1.96


def interval(values: Sequence[float]) -> Interval | None:
    """Mean and 95 % interval of independent repetitions."""
    if not values:
        return None
    mean, count = fmean(values), len(values)
    if count == 1:
        return Interval(mean=mean, low=None, high=None, count=1)
    point = T[count - 2] if count - 2 < len(T) else NORMAL
    half = point * stdev(values) / sqrt(count)
    return Interval(mean=mean, low=mean - half, high=mean + half, count=count)


def arms(jobs: Iterable[JobRow]) -> tuple[SweepArm, ...]:
    """Jobs that differ in nothing but their seed are one arm, in the order of the grid."""
    grouped: dict[str, list[JobRow]] = defaultdict(list)
    values: dict[str, dict[str, Any]] = {}
    for job in jobs:
        point = {field: value for field, value in (job.arm or {}).items() if field != SEED}
        key = json.dumps(point)
        grouped[key].append(job)
        values[key] = point
    return tuple(_arm(values[key], members) for key, members in grouped.items())


def _arm(values: dict[str, Any], jobs: Sequence[JobRow]) -> SweepArm:
    results = [job.result for job in jobs if job.result]
    passed = [result["gain"] for result in results if result.get("gain")]
    rewards = [result["reward_gain"] for result in results if result.get("reward_gain")]
    return SweepArm.model_validate(
        {
            "values": values,
            "jobs": [job.id for job in jobs],
            "statuses": Counter(job.status for job in jobs),
            "pass_rate": interval([gain["after"] for gain in passed]),
            "gain": interval([gain["difference"] for gain in passed]),
            "reward": interval([gain["after"] for gain in rewards]),
        }
    )
