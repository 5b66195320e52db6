"""Whether a job can learn anything, found out from a few rollouts of the base model."""

from typing import Literal

from pydantic import Field

from dressage.spec.base import Spec


class PreflightSpec(Spec):
    """A look at the base model before training."""

    cases: int = Field(
        default=8, ge=0, le=256, description="Cases that are tried, a whole group each; 0: none."
    )
    only: bool = Field(default=False, description="End after it: what `POST /jobs/preflight` asks.")


class NullAgent(Spec):
    """An agent that solves nothing, and what the measures give it all the same."""

    name: str = Field(description="`empty`, `echo`, `stuffing`, `constant` or `truncated`.")
    cases: int = Field(default=0, description="That it has answered.")
    mean_reward: float | None
    values: dict[str, float | None] = Field(description="Mean value by measure.")


class TimeEstimate(Spec):
    """What the job will take, from the rollouts and one update that were timed."""

    seconds_per_step: float
    steps: int
    hours: float = Field(description="Of training; evaluations and exports come on top.")
    gpu_hours: float


class MemoryEstimate(Spec):
    """Peak memory of the trial update, with the optimizer's state, on the device it ran on."""

    device: str
    peak_bytes: int
    available_bytes: int


class PreflightReport(Spec):
    """Shares are of rollouts, or of groups where it says so."""

    verdict: Literal["go", "warn", "stop"]
    reasons: tuple[str, ...] = Field(description="Why not `go`, a sentence each.")
    cases: int
    group_size: int
    pass_at_1: float | None = Field(
        description="Share of rollouts that solve their case; null: no reward says what that is."
    )
    pass_at_k: float | None = Field(
        description="Share of cases solved at least once in their group."
    )
    mean_reward: float | None
    mixed_groups: float = Field(description="Groups with a spread of rewards: only they teach.")
    unscored: float = Field(description="Rollouts without a reward, because a measure failed.")
    truncated: float
    tool_errors: float = Field(description="Tool calls that failed, of all.")
    tool_calls: float = Field(description="Calls a rollout, on average.")
    completion_tokens: float = Field(description="Of a rollout, on average.")
    memory: MemoryEstimate
    time: TimeEstimate
    null_agents: tuple[NullAgent, ...]
    hackable_measures: tuple[str, ...] = Field(
        description="Measures that give an agent that solves nothing as much as they should not."
    )
