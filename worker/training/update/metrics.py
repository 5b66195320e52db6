"""The metrics of a step's rollouts, of all processes; averaged over the steps of a log line.

Names are TRL's where it has one. Lengths and ends are of all that is sampled, masked rollouts too.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import stdev

from dressage.measuring.advantages import has_no_spread
from dressage.spec.event import MeasureVerdict, TokenRole
from worker.training.rewards.weighted import ScoredRollout
from worker.training.rollout.rollout import Rollout


@dataclass(frozen=True)
class RolloutFigures:
    """What a step's metrics need of one rollout: small enough to be told to other processes."""

    verdicts: tuple[MeasureVerdict, ...]
    scored: bool
    passed: bool
    prompt: int
    completion: int
    observation: int
    calls: int
    failed_calls: int
    escaped_markup: int
    unshown_results: int
    stop_reason: str
    truncated: bool
    lost: bool

    @classmethod
    def of(cls, one: ScoredRollout) -> "RolloutFigures":
        """Of one rollout."""
        rollout = one.rollout
        return cls(
            verdicts=tuple(v.model_copy(update={"reason": ""}) for v in one.verdicts),
            scored=one.reward is not None,
            passed=one.passed,
            prompt=len(rollout.prompt_ids),
            completion=len(rollout.completion_ids),
            observation=rollout.roles.count(TokenRole.OBSERVATION),
            calls=len(rollout.tool_calls),
            failed_calls=rollout.tool_failures,
            escaped_markup=rollout.escaped_markup,
            unshown_results=rollout.unshown_results,
            stop_reason=str(rollout.stop_reason),
            truncated=rollout.truncated,
            lost=rollout.lost is not None,
        )


def batch_metrics(
    figures: Sequence[RolloutFigures],
    groups: Sequence[Sequence[float | None]],
    *,
    decided: bool,
    resampled: int,
) -> dict[str, float]:
    """Values by name, `stage/name`.

    Args:
        figures: Of the rollouts of all processes.
        groups: Their rewards by group.
        decided: Whether any reward says what a pass is.
        resampled: Groups that were played in place of others.
    """
    count = len(figures)
    calls = sum(one.calls for one in figures)
    scored = [float(one.passed) for one in figures if one.scored]
    lengths = [float(one.completion) for one in figures]
    ended = [float(one.completion) for one in figures if not one.truncated] or [0.0]
    values = {
        "pass_rate": mean(scored) if decided else math.nan,
        "pass_rate_of_all": sum(scored) / count if decided else math.nan,
        "environments/lost": float(sum(one.lost for one in figures)),
        "groups/dropped": mean([float(None in group) for group in groups]),
        "groups/no_spread": mean([float(has_no_spread(group)) for group in groups]),
        "groups/resampled": float(resampled),
        "tools/calls": calls / count,
        "tools/failed_share": sum(one.failed_calls for one in figures) / calls if calls else 0.0,
        "tools/escaped_markup": float(sum(one.escaped_markup for one in figures)),
        "tools/unshown_results": float(sum(one.unshown_results for one in figures)),
        "tokens/observation": mean([float(one.observation) for one in figures]),
        "tokens/longest_prompt": float(max(one.prompt for one in figures)),
        "completions/mean_length": mean(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": mean([float(one.truncated) for one in figures]),
        "completions/mean_terminated_length": mean(ended),
        "completions/min_terminated_length": min(ended),
        "completions/max_terminated_length": max(ended),
    }
    for verdicts in zip(*(one.verdicts for one in figures), strict=True):
        name = f"measures/{verdicts[0].measure}"
        values[name] = mean([v.value for v in verdicts if v.value is not None])
        values[f"{name}/failed"] = float(sum(bool(v.error) for v in verdicts))
    stops = Counter(one.stop_reason for one in figures)
    return values | {f"stop/{reason}": number / count for reason, number in stops.items()}


def reward_metrics(groups: Sequence[Sequence[float | None]]) -> dict[str, float]:
    """Mean and standard deviation of all rewards, and the share of groups without spread."""
    known = [reward for group in groups for reward in group if reward is not None]
    return {
        "reward": mean(known),
        "reward_std": stdev(known) if len(known) > 1 else 0.0,
        "frac_reward_zero_std": mean([float(has_no_spread(group)) for group in groups]),
    }


def age_metrics(rollouts: Sequence[Rollout], version: int) -> dict[str, float]:
    """How many versions of the weights behind their oldest tokens are."""
    oldest = [one.oldest_version for one in rollouts]
    ages = [float(version - known) for known in oldest if known is not None]
    return {"rollouts/age/mean": mean(ages), "rollouts/age/max": max(ages, default=math.nan)}


def mean(values: Sequence[float]) -> float:
    """The mean of some numbers; NaN without any."""
    return sum(values) / len(values) if values else math.nan
