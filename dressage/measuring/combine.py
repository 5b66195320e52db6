"""The reward of a rollout: the weighted sum of what its measures say."""

from collections.abc import Sequence

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
            error=outcome.failure,
        )
        for reward, outcome in zip(rewards, outcomes, strict=True)
    )


def combined(
    rewards: Sequence[RewardSpec], verdicts: Sequence[MeasureVerdict]
) -> tuple[float | None, bool]:
    """The reward, None when a measure failed; and whether the case was solved."""
    known = [verdict.value for verdict in verdicts if verdict.value is not None]
    if len(known) < len(verdicts):
        return None, False
    total = sum(r.weight * value for r, value in zip(rewards, known, strict=True))
    # A penalty (negative weight) has no part in whether the case was solved.
    passed = all(value >= 1.0 for r, value in zip(rewards, known, strict=True) if r.weight > 0)
    return total, passed
