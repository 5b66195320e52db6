"""The table of a sweep: means over repetitions, with intervals."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from app.db.models import JobRow
from dressage.intervals import of_repetitions
from dressage.spec.sweep import SEED, Interval, SweepArm


def interval(values: Sequence[float], within: tuple[float, float] | None = None) -> Interval | None:
    """Mean and 95 % interval of independent repetitions, and of nothing that cannot be."""
    if not values:
        return None
    low, high = of_repetitions(values, within=within) or (None, None)
    return Interval(mean=fmean(values), low=low, high=high, count=len(values))


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
            "pass_rate": interval([gain["after"] for gain in passed], (0, 1)),
            "gain": interval([gain["difference"] for gain in passed], (-1, 1)),
            "reward": interval([gain["after"] for gain in rewards]),
        }
    )
