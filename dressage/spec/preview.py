"""`POST /measures/preview`: measures run on given rollouts, before any job does."""

from typing import Any

from pydantic import Field, model_validator

from dressage.spec.base import Spec
from dressage.spec.event import MeasureVerdict
from dressage.spec.measure import RewardSpec, with_bare_names


class PreviewToolCall(Spec):
    """A call that the rollout made."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    result: str | None = None
    error: str | None = None


class PreviewRollout(Spec):
    """A finished rollout, as somebody imagines it or as a job stored it."""

    case_id: str | None = Field(
        default=None, description="Of the suite; gives input, expect and metadata."
    )
    input: str | list[dict[str, Any]] = ""
    expect: dict[str, Any] = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)
    answer: str = Field(default="", description="The final assistant message.")
    tool_calls: tuple[PreviewToolCall, ...] = ()
    messages: tuple[dict[str, Any], ...] = Field(
        default=(), description="The conversation; made of input and answer unless given."
    )
    stop_reason: str = "completed"


class MeasurePreview(Spec):
    """What to run on what."""

    suite: str = Field(min_length=1, description="`name`, `name@version` or a suite id.")
    rewards: tuple[RewardSpec, ...] = Field(min_length=1, max_length=50)
    rollouts: tuple[PreviewRollout, ...] = Field(min_length=1, max_length=100)
    environment: str | None = Field(
        default=None,
        description="An `Environment` of the suite: a fresh one is reset for each rollout, and its "
        "tool calls are played on it, before the measures look at it.",
    )
    timeout: float = Field(default=10, gt=0, le=60, description="Seconds for one call.")

    @model_validator(mode="before")
    @classmethod
    def _bare_names(cls, data: Any) -> Any:
        return with_bare_names(data)


class PreviewResult(Spec):
    """What the measures say of one rollout."""

    reward: float | None = Field(description="null: a measure failed, see its error.")
    passed: bool
    verdicts: tuple[MeasureVerdict, ...]


class PreviewResults(Spec):
    """One result for each rollout, in their order."""

    items: tuple[PreviewResult, ...]
