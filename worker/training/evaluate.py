"""Held-out evaluation, and whether training gained anything: a paired bootstrap."""

from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from dressage.spec.event import Evaluation, Gain
from dressage.spec.suite import Case
from worker.training.process.seeds import derived_seed
from worker.training.rewards.weighted import ScoredRollout

RESAMPLES = 10_000
AT_ONCE = 500  # so that many cases do not fill the memory


def split(cases: Sequence[Case], held_out: int) -> tuple[list[Case], list[Case]]:
    """Training and held-out cases, in suite order.

    Which cases are held out depends on their content alone, not on a job's seed: matched jobs
    evaluate on the same ones, and a new version of a suite keeps its old ones apart.
    """
    ranked = sorted(cases, key=lambda case: derived_seed("holdout", case.id))
    held = {case.id for case in ranked[:held_out]}
    return [c for c in cases if c.id not in held], [c for c in cases if c.id in held]


def summary(name: str, step: int, scored: Sequence[ScoredRollout]) -> Evaluation:
    """Mean reward and pass rate over the cases whose measures gave a verdict."""
    known = [s for s in scored if s.reward is not None]
    rewards = {s.rollout.case.id: float(s.reward or 0.0) for s in known}
    passed = {s.rollout.case.id: s.passed for s in known}
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
    one = np.array([before[case] for case in common], dtype=np.float64)
    other = np.array([after[case] for case in common], dtype=np.float64)
    low, high = np.percentile(_resampled_means(other - one, seed), [2.5, 97.5])
    return Gain(
        before=float(one.mean()),
        after=float(other.mean()),
        difference=float((other - one).mean()),
        low=float(low),
        high=float(high),
        count=len(common),
    )


def _resampled_means(values: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    """Means of `RESAMPLES` draws with replacement, shape (RESAMPLES,)."""
    rng, count = np.random.default_rng(seed), len(values)
    parts = [
        values[rng.integers(count, size=(AT_ONCE, count))].mean(axis=1)
        for _ in range(RESAMPLES // AT_ONCE)
    ]
    return np.concatenate(parts)
