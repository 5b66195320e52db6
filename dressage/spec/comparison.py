"""Evaluations of one suite side by side, and stored rollouts graded anew."""

from typing import Any

from pydantic import Field, model_validator

from dressage.spec.base import Spec
from dressage.spec.event import Gain, MeasureVerdict
from dressage.spec.measure import RewardSpec, with_bare_names


class ComparedEvaluation(Spec):
    """One side of a comparison."""

    job_id: str
    job_name: str
    suite: str
    evaluation: str = Field(description="`before`, `step-20`, `after`.")
    step: int
    count: int
    pass_rate: float | None
    mean_reward: float


class ComparedPair(Spec):
    """Two evaluations, case by case."""

    first: str = Field(description="Job id.")
    second: str = Field(description="Job id; differences are second less first.")
    pass_rate: Gain | None = Field(description="null: one of them does not say what a pass is.")
    reward: Gain | None
    better: tuple[str, ...] = Field(description="Cases that only the second one passes.")
    worse: tuple[str, ...] = Field(description="Cases that only the first one passes.")
    notes: tuple[str, ...] = Field(default=(), description="Why they may not be comparable.")


class Comparison(Spec):
    """All evaluations that were asked for, and every pair of them."""

    items: tuple[ComparedEvaluation, ...]
    pairs: tuple[ComparedPair, ...]


class RegradeSpec(Spec):
    """Other measures for rollouts that a job has stored."""

    rewards: tuple[RewardSpec, ...] = Field(min_length=1, max_length=50)
    suite: str | None = Field(
        default=None,
        description="Whose measures: another version of the job's suite; its own unless given.",
    )
    phases: tuple[str, ...] = Field(
        default=("before", "after"),
        min_length=1,
        max_length=20,
        description="Which rollouts: evaluations by name, or `train`.",
    )
    limit: int = Field(default=200, ge=1, le=1000, description="Rollouts of each phase at most.")
    timeout: float = Field(default=10, gt=0, le=60, description="Seconds for one call.")

    @model_validator(mode="before")
    @classmethod
    def _bare_names(cls, data: Any) -> Any:
        return with_bare_names(data)


class RegradedRollout(Spec):
    """One rollout as it was graded, and as it is now."""

    id: str
    phase: str
    step: int
    case_id: str
    index: int
    reward_before: float | None
    reward: float | None = Field(description="null: a measure failed, see its error.")
    passed: bool
    advantage_before: float | None
    advantage: float | None = Field(description="Of training rollouts whose group is whole.")
    verdicts: tuple[MeasureVerdict, ...]


class RegradedPhase(Spec):
    """What changed in one phase."""

    phase: str
    rollouts: int
    changed: int = Field(description="Rollouts with another reward.")
    mean_reward_before: float | None
    mean_reward: float | None
    pass_rate: float | None
    groups: int = Field(description="Whole groups of training.")
    groups_with_spread_before: int
    groups_with_spread: int
    turned: int = Field(description="Advantages that have another sign.")


class Regrade(Spec):
    """Stored rollouts under changed measures. Nothing is stored, and no GPU is used."""

    items: tuple[RegradedRollout, ...]
    phases: tuple[RegradedPhase, ...]
    gain: Gain | None = Field(
        default=None, description="Of the pass rate from `before` to `after` by these measures."
    )
    reward_gain: Gain | None = None
    notes: tuple[str, ...] = ()
