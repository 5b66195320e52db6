"""The reward of a rollout: the weighted sum of what its measures say."""

from collections.abc import Sequence
from math import fsum

from dressage.sandbox.process import Outcome
from dressage.spec.event import MeasureVerdict
from dressage.spec.measure import RewardSpec


def verdicts_of(
    rewards: Sequence[RewardSpec], outcomes: Sequence[Outcome]
) -> tuple[MeasureVerdict, ...]:
    """What each measure said about one rollout, or why it could not."""
    return tuple(
        MeasureVerdict(
            measure=reward.name,
            value=None if outcome.failure else outcome.value["value"],
            reason=outcome.message if outcome.failure else outcome.value["reason"],
            passed=None if outcome.failure else outcome.value.get("passed"),
            error=outcome.failure,
        )
        for reward, outcome in zip(rewards, outcomes, strict=True)
    )


def combined(
    rewards: Sequence[RewardSpec], verdicts: Sequence[MeasureVerdict]
) -> tuple[float | None, bool]:
    """The reward, None when a measure failed or none applies; and whether the case was solved.

    It is solved when every measure that says pass or fail says pass; where all give numbers, when
    each reaches 1. Rewards with `success` decide alone. Penalties (negative weights) never do.
    """
    known = [
        (reward.weight, verdict.value)
        for reward, verdict in zip(rewards, verdicts, strict=True)
        if verdict.value is not None
    ]
    if not known or any(verdict.error for verdict in verdicts):
        return None, False
    total = fsum(weight * value for weight, value in known)
    deciding = [verdicts[at] for at in may_decide(rewards) if verdicts[at].value is not None]
    said = [v for v in deciding if v.passed is not None]
    if not said or any(reward.success for reward in rewards):
        said = deciding
    return total, bool(said) and all((v.value or 0.0) >= 1.0 for v in said)


def may_decide(rewards: Sequence[RewardSpec]) -> list[int]:
    """Positions of the rewards that may say whether a case is solved; none: nothing says it."""
    named = [at for at, reward in enumerate(rewards) if reward.success]
    return named or [
        at for at, reward in enumerate(rewards) if reward.success is None and reward.weight > 0
    ]
