"""A job's history: typed lines with a sequence number, and what the bigger ones carry."""

from dataclasses import asdict
from datetime import datetime
from enum import StrEnum
from typing import Any

from pydantic import Field

from dressage.intervals import Difference
from dressage.spec.base import Spec, View


class EventType(StrEnum):
    """What a line of a job's history is about."""

    STATUS = "status"
    PROGRESS = "progress"
    METRICS = "metrics"
    LOG = "log"
    ROLLOUT = "rollout"
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"
    ARTIFACT = "artifact"
    EXPORT = "export"
    ADJUSTMENT = "adjustment"
    WARNING = "warning"
    PREFLIGHT = "preflight"
    STALLED = "stalled"
    ALIVE = "alive"


class Event(View):
    """One line. `seq` counts from 1 within a job, without gaps."""

    seq: int
    type: EventType
    time: datetime
    data: dict[str, Any]


class EventPage(Spec):
    """One page of events; pass `next_cursor` as `cursor` for the next one."""

    items: tuple[Event, ...]
    next_cursor: str | None = None


class MetricsRow(Spec):
    """The metrics of one logged step."""

    step: int
    time: datetime
    values: dict[str, float | None]


class Metrics(Spec):
    """A job's whole metric history."""

    items: tuple[MetricsRow, ...]


class TokenRole(StrEnum):
    """Who wrote a token of a rollout."""

    PROMPT = "prompt"
    ACTION = "action"
    OBSERVATION = "observation"
    SCAFFOLD = "scaffold"


class MeasureVerdict(Spec):
    """What one measure said."""

    measure: str
    value: float | None = Field(
        description="null: the measure failed, see `error`; or, without one, it does not apply."
    )
    reason: str
    passed: bool | None = Field(default=None, description="It said pass or fail; null: a number.")
    error: str | None = Field(default=None, description="How it failed: `raised`, `timed_out`, …")


class Rollout(Spec):
    """One stored rollout, whole."""

    id: str
    phase: str = Field(description="`train`, or the name of an evaluation.")
    step: int
    case_id: str
    index: int = Field(description="Position in its group.")
    messages: tuple[dict[str, Any], ...]
    token_ids: tuple[int, ...]
    roles: str = Field(description="One letter a token: p, a, o, s.")
    stop_reason: str
    reward: float | None = Field(description="null: dropped from the group, see the verdicts.")
    verdicts: tuple[MeasureVerdict, ...]
    advantage: float | None = None
    error: str | None = Field(default=None, description="Why its environment was lost.")
    whole: bool = Field(
        default=True,
        description="Whether messages and tokens are stored (`training.keep_rollouts`).",
    )
    resampled: bool = Field(
        default=False, description="Played in place of a group without a spread of rewards."
    )


class RolloutPage(Spec):
    """One page of rollouts; pass `next_cursor` as `cursor` for the next one."""

    items: tuple[Rollout, ...]
    next_cursor: str | None = None


class Evaluation(Spec):
    """Pass rate on held-out cases at one point of the training."""

    name: str = Field(description="`before`, `step-20`, `after`, …")
    step: int
    count: int
    unscored: int = Field(default=0, description="Cases left out because a measure failed.")
    mean_reward: float
    pass_rate: float | None = Field(
        description="Share of cases that were solved; null: no reward says what that is."
    )
    pass_rate_of_all: float | None = Field(
        default=None, description="The same with the cases that were left out counted as failed."
    )
    rewards: dict[str, float] = Field(description="Reward by case id.")
    passed: dict[str, bool] = Field(description="By case id.")
    environment_cross_entropy: float | None = Field(
        default=None,
        description="Nats per observation token of these rollouts; measured in jobs with ECHO.",
    )


class Gain(Spec):
    """After minus before on the same cases, with a 95 % paired interval (`dressage.intervals`)."""

    before: float
    after: float
    difference: float
    low: float | None = Field(description="Null: too few cases for an interval.")
    high: float | None
    count: int
    few: bool = Field(
        default=False,
        description="Too few cases: there is no interval, or it is wider than 95 % ask for.",
    )

    @classmethod
    def of(cls, difference: Difference | None) -> "Gain | None":
        """A difference as it is shown."""
        return cls(**asdict(difference)) if difference else None


class Evaluations(Spec):
    """All evaluations of a job, and what training gained."""

    items: tuple[Evaluation, ...]
    gain: Gain | None = Field(default=None, description="Of the pass rate.")
    reward_gain: Gain | None = Field(default=None, description="Of the mean reward.")
