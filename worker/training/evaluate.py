"""Held-out evaluation, and whether training gained anything: a paired bootstrap."""

from collections.abc import Sequence

import numpy as np

from dressage.spec.event import Evaluation, Gain
from dressage.spec.suite import Case
from worker.training.rewards.weighted import Scored
from worker.training.seeds import derived_seed

RESAMPLES = 10_000


def split(cases: Sequence[Case], holdout: float) -> tuple[list[Case], list[Case]]:
    """Training and held-out cases, in suite order.

    Which cases are held out depends on their content alone, not on a job's seed: matched jobs
    evaluate on the same ones, and a new version of a suite keeps its old ones apart.
    """
    count = round(len(cases) * holdout)
    if holdout > 0 and len(cases) > 1:
        count = max(count, 1)
    ranked = sorted(cases, key=lambda case: derived_seed("holdout", case.id))
    held = {case.id for case in ranked[:count]}
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
        mean_reward=float(np.mean(list(rewards.values()))) if known else 0.0,
        pass_rate=float(np.mean(list(passed.values()))) if known else 0.0,
        rewards=rewards,
        passed=passed,
    )


def gain(before: dict[str, float], after: dict[str, float], *, seed: int = 0) -> Gain | None:
    """Mean difference over the cases both have, with a 95 % paired bootstrap interval.

    Percentile interval over resampled cases (Efron & Tibshirani 1993, chapter 13).
    """
    common = sorted(before.keys() & after.keys())
    if not common:
        return None
    b = np.array([before[case] for case in common], dtype=float)
    a = np.array([after[case] for case in common], dtype=float)
    rng = np.random.default_rng(seed)
    picks = rng.integers(0, len(common), size=(RESAMPLES, len(common)))
    means = (a - b)[picks].mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return Gain(
        before=float(b.mean()),
        after=float(a.mean()),
        difference=float((a - b).mean()),
        low=float(low),
        high=float(high),
        count=len(common),
    )
