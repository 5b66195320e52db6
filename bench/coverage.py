"""How often the intervals of `dressage.intervals` hold the true value: nominally 95 % of samples.

    python bench/coverage.py

Pass rates: exact, by adding up the probabilities of all possible outcomes, for 5 to 200 held-out
cases and rates before and after from 0.05 to 0.95. Rewards and repetitions: simulated. Baseline:
the percentile bootstrap over cases, which many tools show. `lowest` and `highest` are over all
cells that the report does not mark as `few`; `lowest_of_all` is over every interval that is shown.
The last line has the figures as JSON.
"""

import json
import sys
from itertools import product
from math import lgamma, log

import numpy as np

from dressage.intervals import (
    FEW_PASSES,
    FEW_REWARDS,
    FEWEST_REWARDS,
    of_repetitions,
    paired_passes,
    paired_rewards,
)

COUNTS = (5, 8, 10, 15, 20, 30, 50, 75, 100, 150, 200)
RATES = tuple(round(0.05 * n, 2) for n in range(1, 20))
SAMPLES = 2000
RESAMPLES = 1000


def passes(count, better, worse):
    """The interval of a sample, and whether it is marked."""
    before = [False] * better + [True] * worse + [False] * (count - better - worse)
    after = [True] * better + [False] * worse + [False] * (count - better - worse)
    named = [dict(enumerate(values)) for values in (before, after)]
    return paired_passes(*[{str(k): v for k, v in values.items()} for values in named])


def exact_coverage(count):
    """Of each pair of rates: how often the truth is inside, and whether such samples are few."""
    outcomes = [(b, w) for b in range(count + 1) for w in range(count + 1 - b)]
    found = [passes(count, b, w) for b, w in outcomes]
    lows, highs = np.array([f.low for f in found]), np.array([f.high for f in found])
    better, worse = np.array(outcomes).T
    ways = np.array(
        [
            lgamma(count + 1) - lgamma(b + 1) - lgamma(w + 1) - lgamma(count - b - w + 1)
            for b, w in outcomes
        ]
    )
    for before, after in product(RATES, RATES):
        up, down = (1 - before) * after, before * (1 - after)
        rest = count - better - worse
        chances = np.exp(ways + better * log(up) + worse * log(down) + rest * log(1 - up - down))
        truth = after - before
        inside = (lows <= truth + 1e-12) & (truth <= highs + 1e-12)
        variance = count * (up + down - truth**2)
        yield float(chances[inside].sum()), variance < FEW_PASSES


def bootstrap_coverage(count, rng):
    """The same for the percentile bootstrap, by simulation, over fewer rates."""
    lowest = 1.0
    for before, after in product(RATES[::6], RATES[::6]):
        inside = 0
        for _ in range(200):
            change = (rng.random(count) < after).astype(int) - (rng.random(count) < before)
            means = rng.choice(change, (RESAMPLES, count)).mean(axis=1)
            low, high = np.percentile(means, [2.5, 97.5])
            inside += low - 1e-9 <= after - before <= high + 1e-9
        lowest = min(lowest, inside / 200)
    return lowest


def reward_coverage(rng):
    """Rewards that are normal, that lie in [0, 1], and that are a pass with some shaping."""
    draws = {
        "normal": lambda rate, n: rng.normal(rate, 0.3, n),
        "beta": lambda rate, n: rng.beta(2 * rate, 2 * (1 - rate), n),
        "pass and shaping": lambda rate, n: 0.8 * (rng.random(n) < rate) + 0.2 * rng.random(n),
    }
    weight = {"normal": 1.0, "beta": 1.0, "pass and shaping": 0.8}
    for name, count in product(draws, (FEWEST_REWARDS, 50, FEW_REWARDS, 200)):
        for before, after in product(RATES[::6], RATES[::6]):
            inside = 0
            for _ in range(SAMPLES):
                one, other = (draws[name](rate, count) for rate in (before, after))
                gain = paired_rewards(
                    {str(k): float(v) for k, v in enumerate(one)},
                    {str(k): float(v) for k, v in enumerate(other)},
                )
                truth = weight[name] * (after - before)
                inside += gain.low <= truth <= gain.high
            yield inside / SAMPLES, count < FEW_REWARDS


def repetition_coverage(rng):
    """Means over three to ten seeds."""
    for count in (3, 5, 10):
        pairs = [of_repetitions(list(rng.normal(0.6, 0.05, count))) for _ in range(20_000)]
        yield sum(low <= 0.6 <= high for low, high in pairs) / len(pairs)


def main():
    """Print a table and the figures."""
    rng = np.random.default_rng(0)
    passing = [(count, *cell) for count in COUNTS for cell in exact_coverage(count)]
    print("pass rates   cases  lowest  highest  (not few: lowest  highest)   bootstrap lowest")
    baseline = {count: bootstrap_coverage(count, rng) for count in (5, 10, 20, 50)}
    for count in COUNTS:
        every = [c for n, c, _ in passing if n == count]
        enough = [c for n, c, few in passing if n == count and not few]
        shown = f"{min(enough):.3f}  {max(enough):.3f}" if enough else "-"
        beside = f"{baseline[count]:.3f}" if count in baseline else ""
        print(f"{count:18d}  {min(every):.3f}   {max(every):.3f}   ({shown})   {beside}")
    rewards = list(reward_coverage(rng))
    seeds = list(repetition_coverage(rng))
    print("rewards:", f"{min(c for c, _ in rewards):.3f}..{max(c for c, _ in rewards):.3f}")
    print("repetitions:", ", ".join(f"{c:.3f}" for c in seeds))
    enough = [c for _, c, few in passing if not few] + [c for c, few in rewards if not few] + seeds
    every = [c for _, c, _ in passing] + [c for c, _ in rewards] + seeds
    figures = {
        "benchmark": "coverage",
        "nominal": 0.95,
        "lowest": round(min(enough), 4),
        "highest": round(max(enough), 4),
        "lowest_of_all": round(min(every), 4),
        "baseline": "percentile bootstrap",
        "baseline_lowest": round(min(baseline.values()), 4),
        "cells": len(every),
    }
    print(json.dumps(figures))
    return 0 if figures["lowest"] >= 0.93 and figures["highest"] <= 0.97 else 1


if __name__ == "__main__":
    sys.exit(main())
