"""Held-out evaluation, and whether training gained anything: a paired bootstrap."""

import random
from collections.abc import Mapping, Sequence
from statistics import fmean

from dressage.spec.event import Evaluation, Gain
from dressage.spec.suite import Case
from worker.training.rewards.weighted import Scored
from worker.training.seeds import derived_seed

RESAMPLES = 10_000


def split(cases: Sequence[Case], held_out: int) -> tuple[list[Case], list[Case]]:
    """Training and held-out cases, in suite order.

    Which cases are held out depends on their content alone, not on a job's seed: matched jobs
    evaluate on the same ones, and a new version of a suite keeps its old ones apart.
    """
    ranked = sorted(cases, key=lambda case: derived_seed("holdout", case.id))
    held = {case.id for case in ranked[:held_out]}
    return [c for c in cases if c.id not in held], [c for c in cases if c.id in held]


def summary(name: str, step: int, scored: Sequence[Scored]) -> Evaluation:
    """Mean reward and pass rate over the cases whose measures gave a verdict."""
    known = [s for s in scored if s.reward is not None]
    rewards = {s.episode.case.id: float(s.reward or 0.0) for s in known}
    passed = {s.episode.case.id: s.passed for s in known}
    return Evaluation(
        name=name,
        step=step,
        count=len(known),
        unscored=len(scored) - len(known),
        mean_reward=fmean(rewards.values()) if known else 0.0,
        pass_rate=fmean(passed.values()) if known else 0.0,
        rewards=rewards,
        passed=passed,
    )


def paired_gain(
    before: Mapping[str, float], after: Mapping[str, float], *, seed: int = 0
) -> Gain | None:
    """Mean difference over the cases both have, with a 95 % percentile bootstrap interval.

    Cases are resampled with replacement (Efron & Tibshirani 1993, chapter 13).

    Args:
        before: A number for each case, of the base model.
        after: The same of the trained model.
        seed: Of the resampling.

    Returns:
        None when no case is in both.
    """
    common = sorted(before.keys() & after.keys())
    if not common:
        return None
    count = len(common)
    differences = [after[case] - before[case] for case in common]
    rng = random.Random(seed)
    means = sorted(sum(rng.choices(differences, k=count)) / count for _ in range(RESAMPLES))
    return Gain(
        before=sum(before[case] for case in common) / count,
        after=sum(after[case] for case in common) / count,
        difference=sum(differences) / count,
        low=_percentile(means, 0.025),
        high=_percentile(means, 0.975),
        count=count,
    )


def _percentile(ordered: list[float], share: float) -> float:
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])
