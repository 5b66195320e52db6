"""`POST /jobs`: the specification, and the job as the service shows it."""

from datetime import datetime
from math import ceil
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from dressage.spec.agent import AgentSpec
from dressage.spec.artifact import Artifact
from dressage.spec.base import JSON_NUL, Spec, View
from dressage.spec.export import ExportSpec
from dressage.spec.exported import ExportResult
from dressage.spec.measure import RewardSpec
from dressage.spec.preflight import PreflightSpec
from dressage.spec.queue import Wait
from dressage.spec.status import ExportStatus, JobStatus, Reason
from dressage.spec.training import EvaluationSpec, TrainingSpec

EXAMPLE = {
    "name": "calculator-agent",
    "agent": {
        "model": "Qwen/Qwen3-0.6B",
        "instructions": "Solve the exercise. Use the calculator.",
        "tools": ["calculate"],
    },
    "suite": "arithmetic",
    "rewards": [{"measure": "correct_answer", "weight": 1.0}],
    "training": {"num_generations": 4, "lora": {"r": 16, "alpha": 32}},
    "evaluation": {"holdout": 0.2},
    "exports": [{"type": "gguf", "quantization": "q8_0"}],
    "resources": {"gpus": 1},
}


Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9._/=-]{1,60}$")]


class ResourcesSpec(Spec):
    """What a worker must have free to take the job."""

    gpus: int = Field(
        default=1,
        ge=0,
        le=64,
        description="Of one worker, each with a process of its own; 0: a worker's CPU.",
    )
    gpu_type: str | None = Field(
        default=None,
        min_length=1,
        max_length=100,
        description="Part of the GPU's name, in any case: `h100`.",
    )
    min_memory_gb: float | None = Field(
        default=None, gt=0, le=10_000, description="Of each GPU, in GiB."
    )
    labels: tuple[Label, ...] = Field(
        default=(), max_length=20, description="All must be among the worker's."
    )
    preemptible: bool = Field(
        default=False,
        description="Let a job of a higher class have the GPU after the current step; this one "
        "keeps its place in the queue and goes on from its checkpoint.",
    )
    network: bool = Field(
        default=False, description="Let the suite's code use the network, if the operator does."
    )


class JobSpec(Spec):
    """An agent, a suite, rewards and a configuration."""

    spec_version: Literal[1] = 1
    name: str = Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f]+$")
    agent: AgentSpec
    suite: str = Field(
        min_length=1,
        description="`name` (its newest version), `name@version` or a suite id.",
        examples=["arithmetic@3"],
    )
    rewards: tuple[RewardSpec, ...] = Field(
        description="At least one. A bare string stands for a measure of weight 1."
    )
    training: TrainingSpec = Field(
        default=TrainingSpec(), description="null: the model is only measured (`evaluation.only`)."
    )
    evaluation: EvaluationSpec = EvaluationSpec()
    preflight: PreflightSpec = PreflightSpec()
    exports: tuple[ExportSpec, ...] = ()
    resources: ResourcesSpec = ResourcesSpec()
    priority: Literal["urgent", "high", "normal", "low"] = "normal"

    def planned_steps(self, training_cases: int) -> int:
        """Optimizer steps on so many cases, unless it ends early."""
        training = self.training
        if self.evaluation.only:
            return 1
        if training.max_steps:
            return training.max_steps
        return max(1, ceil(training.epochs * (training_cases // max(1, self.cases_per_step))))

    @property
    def cases_per_step(self) -> int:
        """Cases of one optimizer step, on all GPUs."""
        return self.training.cases_per_step * max(1, self.resources.gpus)

    @model_validator(mode="before")
    @classmethod
    def _weights_beside_measures(cls, data: Any) -> Any:
        """Accept TRL's spelling, `reward_weights` beside a list of names, and check its length."""
        if not isinstance(data, dict) or not isinstance(data.get("rewards"), list | tuple):
            return data
        rewards = [{"measure": r} if isinstance(r, str) else r for r in data["rewards"]]
        data = {**data, "rewards": rewards}
        if "reward_weights" in data:
            weights = data.pop("reward_weights")
            if not isinstance(weights, list | tuple) or len(weights) != len(rewards):
                count = len(weights) if isinstance(weights, list | tuple) else 0
                raise ValueError(
                    f"reward_weights has {count} weights for {len(rewards)} rewards; "
                    "give one weight per reward"
                )
            if any(not isinstance(r, dict) or "weight" in r for r in rewards):
                raise ValueError("give each weight once: in its reward or in reward_weights")
            data["rewards"] = [
                {**reward, "weight": weight}
                for reward, weight in zip(rewards, weights, strict=True)
            ]
        return data

    @model_validator(mode="before")
    @classmethod
    def _no_training(cls, data: Any) -> Any:
        """`"training": null`: the model is only measured."""
        if not isinstance(data, dict) or "training" not in data or data["training"] is not None:
            return data
        evaluation = data.get("evaluation") or {}
        preflight = data.get("preflight") or {}
        if not isinstance(evaluation, dict) or not isinstance(preflight, dict):
            return data
        return {
            **data,
            # An adapter that adds nothing: the base's own weights keep their type.
            "training": {"lora": {}},
            "evaluation": {**evaluation, "only": True},
            "preflight": {"cases": 0, **preflight},
        }

    @field_validator("rewards")
    @classmethod
    def _some_reward(cls, rewards: tuple[RewardSpec, ...]) -> tuple[RewardSpec, ...]:
        if not rewards:
            raise ValueError("a job needs at least one measure to reward")
        names = [reward.name for reward in rewards]
        if len(set(names)) != len(names):
            raise ValueError(
                "a measure may be named once; add up its weights, or give each a `name`"
            )
        return rewards

    @model_validator(mode="after")
    def _measured_alone(self) -> Self:
        if self.evaluation.only and self.exports:
            raise ValueError("a job that only measures has nothing to export: leave exports out")
        return self

    @model_validator(mode="after")
    def _storable(self) -> Self:
        if JSON_NUL.search(self.model_dump_json()):
            raise ValueError("a text has a NUL character, which cannot be stored")
        return self

    @model_validator(mode="after")
    def _no_export_twice(self) -> Self:
        names = [export.export_name for export in self.exports]
        if len(set(names)) != len(names):
            raise ValueError("exports: the same export is asked for twice")
        return self


class Adjustment(Spec):
    """A value the service changed, with the reason: nothing is repaired silently."""

    field: str
    requested: Any
    effective: Any
    reason: str


class Progress(Spec):
    """How far the current attempt is."""

    step: int = 0
    total_steps: int | None = None
    reward: float | None = None
    loss: float | None = None
    seconds_per_step: float | None = Field(
        default=None, description="Mean over the steps of the current attempt."
    )


class ExportView(View):
    """One export of a job."""

    id: str
    name: str
    spec: ExportSpec
    status: ExportStatus
    reason: Reason | None = None
    message: str | None = None
    attempts: int = 0
    result: ExportResult | None = None
    created_at: datetime
    finished_at: datetime | None = None


class Job(View):
    """A job as the service shows it."""

    id: str
    team: str
    name: str
    status: JobStatus
    reason: Reason | None = Field(default=None, description="Why it ended, or was put back.")
    message: str | None = Field(default=None, description="The same as a sentence for people.")
    waiting: Wait | None = Field(
        default=None, description="Why a queued job does not run yet, its place, and when it may."
    )
    spec: JobSpec = Field(description="The effective specification.")
    sweep_id: str | None = Field(default=None, description="The sweep it is part of.")
    adjustments: tuple[Adjustment, ...] = ()
    progress: Progress = Progress()
    result: dict[str, Any] | None = Field(
        default=None, description="Final loss, evaluations before and after, the model's paths."
    )
    exports: tuple[ExportView, ...] = ()
    artifacts: tuple[Artifact, ...] = ()
    attempts: int = 0
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None


class JobPage(Spec):
    """One page of a list; pass `next_cursor` as `cursor` for the next one."""

    items: tuple[Job, ...]
    next_cursor: str | None = None


class DryRun(Spec):
    """What `POST /jobs?dry_run=true` answers: everything checked, nothing stored."""

    spec: JobSpec
    adjustments: tuple[Adjustment, ...]
    warnings: tuple[str, ...] = Field(
        default=(), description="What would keep it waiting now; a job shows it under `waiting`."
    )
