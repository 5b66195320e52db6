"""Our own metrics of a step, beside TRL's; averaged over the steps of one log line."""

import math
from collections import Counter
from collections.abc import Sequence

from dressage.spec.event import TokenRole
from worker.training.rewards.batch import RolloutBatch
from worker.training.update.advantages import has_no_spread


def batch_metrics(
    batch: RolloutBatch, groups: Sequence[Sequence[float | None]]
) -> dict[str, float]:
    """Values by name, `stage/name`.

    Args:
        batch: The rollouts of this process.
        groups: Rewards by group, of every process.
    """
    rollouts = batch.rollouts
    calls = sum(len(rollout.tool_calls) for rollout in rollouts)
    failed = sum(rollout.tool_failures for rollout in rollouts)
    observed = [float(rollout.roles.count(TokenRole.OBSERVATION)) for rollout in rollouts]
    values = {
        "pass_rate": mean([float(s.passed) for s in batch.scored if s.reward is not None]),
        "environments/lost": float(sum(rollout.lost is not None for rollout in rollouts)),
        "groups/dropped": mean([float(None in group) for group in groups]),
        "groups/no_spread": mean([float(has_no_spread(group)) for group in groups]),
        "groups/resampled": float(batch.resampled),
        "tools/calls": calls / len(rollouts),
        "tools/failed_share": failed / calls if calls else 0.0,
        "tools/escaped_markup": float(sum(rollout.escaped_markup for rollout in rollouts)),
        "tokens/observation": mean(observed),
        "tokens/longest_prompt": float(max(len(rollout.prompt_ids) for rollout in rollouts)),
    }
    for verdicts in zip(*(scored.verdicts for scored in batch.scored), strict=True):
        known = [verdict.value for verdict in verdicts if verdict.value is not None]
        values[f"measures/{verdicts[0].measure}"] = mean(known)
        values[f"measures/{verdicts[0].measure}/failed"] = float(len(verdicts) - len(known))
    stops = Counter(str(rollout.stop_reason) for rollout in rollouts)
    return values | {f"stop/{reason}": count / len(rollouts) for reason, count in stops.items()}


def mean(values: Sequence[float]) -> float:
    """The mean of some numbers; NaN without any."""
    return sum(values) / len(values) if values else math.nan
