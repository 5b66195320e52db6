"""Held-out evaluation, and whether training gained anything."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from dressage.intervals import paired_passes, paired_rewards
from dressage.measuring.combine import may_decide
from dressage.spec.event import Evaluation, Gain
from dressage.spec.measure import RewardSpec
from dressage.spec.suite import Case
from dressage.spec.training import EvaluationSpec
from worker.training.rewards.weighted import ScoredRollout


@dataclass(frozen=True)
class CaseScore:
    """What is left of a held-out rollout once it is stored: small enough to be told to others."""

    case_id: str
    reward: float | None
    passed: bool

    @classmethod
    def of(cls, scored: ScoredRollout) -> "CaseScore":
        """Of one rollout."""
        return cls(scored.rollout.case.id, scored.reward, scored.passed)


def split(cases: Sequence[Case], evaluation: EvaluationSpec) -> tuple[list[Case], list[Case]]:
    """Training and held-out cases, in suite order.

    A case's side hangs on its content and the share alone: not on a job's seed, so that matched
    jobs evaluate on the same ones; not on its id, so that equal cases are never on both sides; and
    not on the other cases, so that a longer version of a suite keeps its old ones where they were.
    """
    boundary = evaluation.boundary([case.place for case in cases])
    return (
        [case for case in cases if case.place >= boundary],
        [case for case in cases if case.place < boundary],
    )


def divided(held_out: Sequence[Case], evaluation: EvaluationSpec) -> tuple[list[Case], list[Case]]:
    """Cases to choose weights by, and cases for the proof.

    The best of several evaluations looks better than it is on the cases it was chosen by.
    """
    if not evaluation.every_steps:
        return [], list(held_out)
    contents = sorted({case.content_hash for case in held_out})
    choosing = set(contents[::2])
    return (
        [case for case in held_out if case.content_hash in choosing],
        [case for case in held_out if case.content_hash not in choosing],
    )


def summary(
    name: str, step: int, scored: Sequence[CaseScore], rewards: Sequence[RewardSpec]
) -> Evaluation:
    """Mean reward and pass rate over the cases whose measures gave a verdict."""
    known = [s for s in scored if s.reward is not None]
    passed = {s.case_id: s.passed for s in known}
    decided = bool(may_decide(rewards))
    return Evaluation(
        name=name,
        step=step,
        count=len(known),
        unscored=len(scored) - len(known),
        mean_reward=fmean(s.reward or 0.0 for s in known) if known else 0.0,
        pass_rate=(fmean(passed.values()) if known else 0.0) if decided else None,
        pass_rate_of_all=sum(passed.values()) / len(scored) if decided and scored else None,
        rewards={s.case_id: float(s.reward or 0.0) for s in known},
        passed=passed if decided else {},
    )


def gained(before: Evaluation | None, after: Evaluation | None) -> tuple[Gain | None, Gain | None]:
    """What training gained in pass rate and in mean reward; None: nothing to compare."""
    if not before or not after:
        return None, None
    return (
        Gain.of(paired_passes(before.passed, after.passed)),
        Gain.of(paired_rewards(before.rewards, after.rewards)),
    )
