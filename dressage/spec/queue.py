"""The shared queue and the workers that serve it, as the service shows them."""

from datetime import datetime
from typing import Any

from pydantic import Field

from dressage.spec.base import Spec, View
from dressage.spec.status import WaitReason


class EstimatedStart(Spec):
    """When a job probably starts, by the durations of jobs like those ahead of it."""

    earliest: datetime
    latest: datetime


class Wait(Spec):
    """Why a queued job does not run yet."""

    position: int = Field(description="1 is next, by class, the team's recent use and arrival.")
    wait_reason: WaitReason = Field(description="For programs.")
    reason: str = Field(description="The same as a sentence for people.")
    estimated_start: EstimatedStart | None = Field(
        default=None, description="null while nothing like it has finished here."
    )
    looked_at: datetime


class QueueEntry(Wait):
    """One queued job. Of another team's job only its place is shown."""

    job_id: str | None = None
    name: str | None = None
    team: str
    priority: str
    gpus: int
    queued_at: datetime


class QueueState(Spec):
    """Everything that waits, in order of rank, and what there is to run it."""

    items: tuple[QueueEntry, ...]
    running: int = Field(description="Jobs that run now.")
    gpus: int = Field(description="GPUs of live workers.")
    gpus_free: int


class Worker(View):
    """A process that takes jobs or exports."""

    id: str
    hostname: str
    queue: str = Field(description="`training` or `exports`.")
    gpus: int
    gpu_type: str | None = None
    gpu_memory_gb: float | None = None
    labels: tuple[str, ...]
    versions: dict[str, Any]
    state: str = Field(description="`active`, `draining`, `sick` or `silent`.")
    state_reason: str | None = None
    jobs: tuple[str, ...] = Field(
        default=(), description="Training here now, of the teams you may see."
    )
    exports: tuple[str, ...] = Field(
        default=(), description="Exports and questions that run here now, by id."
    )
    started_at: datetime
    heartbeat_at: datetime
