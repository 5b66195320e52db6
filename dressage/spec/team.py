"""Teams that share the GPUs, their keys, what they used and what they did."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

from pydantic import AwareDatetime, Field, field_validator

from dressage.spec.base import Spec, View

TeamName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,59}$", examples=["search"])]
Limit = Annotated[int | None, Field(default=None, ge=0, le=2**53)]
Budget = Annotated[float | None, Field(default=None, ge=0, le=1e15)]


class Role(StrEnum):
    """What a key may do: look, or submit for its team, or run the service."""

    VIEWER = "viewer"
    SUBMITTER = "submitter"
    OPERATOR = "operator"


class TeamLimits(View):
    """A team's weight and quotas; null is no limit."""

    weight: float = Field(
        default=1, gt=0, le=1000, description="Its share of the GPUs, against other teams'."
    )
    max_running_gpus: Limit = None
    max_queued_jobs: Limit = None
    gpu_seconds_per_day: Budget = Field(default=None, description="In any 24 hours.")
    gpu_seconds_per_month: Budget = Field(default=None, description="In any 30 days.")
    max_storage_bytes: Limit = Field(default=None, description="Suites and artifacts.")
    keep_files_days: Budget = Field(
        default=None, description="After a job's end; then its files go. Null: until it is deleted."
    )


class TeamChanges(TeamLimits):
    """Limits to change; what is left out stays as it is."""

    @field_validator("weight", mode="before")
    @classmethod
    def _always_has_a_weight(cls, weight: Any) -> Any:
        if weight is None:
            raise ValueError("every team has a weight; 1 is usual")
        return weight


class Team(TeamLimits):
    """A team as the service shows it."""

    name: TeamName
    running_gpus: int
    queued_jobs: int
    storage_bytes: int
    created_at: datetime


class KeySpec(Spec):
    """A key to make."""

    team: TeamName
    role: Role = Role.SUBMITTER
    name: str = Field(
        default="", max_length=200, pattern=r"^[^\x00-\x1f]*$", description="Who or what uses it."
    )
    expires_at: AwareDatetime | None = None
    requests_per_minute: int | None = Field(
        default=None, ge=1, le=10_000_000, description="The service's own limit unless given."
    )


class Key(View):
    """A key without its secret."""

    id: str
    team: str
    role: Role
    name: str
    prefix: str = Field(description="The beginning of the secret, to recognize it by.")
    requests_per_minute: int | None = None
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None


class NewKey(Key):
    """A key as it is shown once, when it is made."""

    secret: str


class KeyPage(Spec):
    """One page of keys; pass `next_cursor` as `cursor` for the next one."""

    items: tuple[Key, ...]
    next_cursor: str | None = None


class UsageBy(StrEnum):
    """What one row of a usage report is about."""

    TEAM = "team"
    JOB = "job"
    ATTEMPT = "attempt"


class UsageRow(Spec):
    """GPU time within a report's period."""

    team: str
    job_id: str | None = None
    attempt: int | None = None
    worker_id: str | None = None
    gpus: int | None = None
    outcome: str | None = None
    attempts: int
    gpu_seconds: float
    seconds: float = Field(description="With or without GPU.")


class Usage(Spec):
    """GPU time of a period, by team, job or attempt."""

    since: datetime
    until: datetime
    items: tuple[UsageRow, ...]


class AuditEntry(View):
    """One change made through the API."""

    time: datetime
    team: str
    key_id: str
    action: str = Field(examples=["POST /jobs/{job_id}/cancel"])
    target: str = Field(examples=["/jobs/job_5f2c9a7b1e0d3c4a6b8f"])


class AuditPage(Spec):
    """One page of changes; pass `next_cursor` as `cursor` for the next one."""

    items: tuple[AuditEntry, ...]
    next_cursor: str | None = None
