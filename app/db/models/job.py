"""A job: what was asked, what runs, where it is."""

from typing import Any

from sqlalchemy import JSON, ForeignKey, Index, UniqueConstraint, false, text
from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import Arrival, Base, CreatedAt, Timestamp

QUEUED = text("status = 'queued'")
UNTRIMMED = text("NOT trimmed AND finished_at IS NOT NULL")
SUCCEEDED = text("status = 'succeeded'")
LIVE = text("status NOT IN ('succeeded', 'failed', 'cancelled')")


class JobRow(Base):
    """One training run. `status` is written by `app.lifecycle.jobs` alone."""

    __tablename__ = "jobs"
    __table_args__ = (
        UniqueConstraint("team", "idempotency_key"),
        Index("ix_jobs_queue", "team", "priority", "arrival", postgresql_where=QUEUED),
        Index("ix_jobs_live", "status", postgresql_where=LIVE),
        Index("ix_jobs_team_arrival", "team", "arrival"),
        Index("ix_jobs_team_status_arrival", "team", "status", "arrival"),
        Index("ix_jobs_status_arrival", "status", "arrival"),
        Index("ix_jobs_name_arrival", "name", "arrival"),
        Index("ix_jobs_untrimmed", "finished_at", postgresql_where=UNTRIMMED),
        Index("ix_jobs_workload", "workload", "finished_at", postgresql_where=SUCCEEDED),
        Index("ix_jobs_finished", "finished_at", postgresql_where=SUCCEEDED),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    arrival: Mapped[Arrival]
    team: Mapped[str]
    name: Mapped[str]
    status: Mapped[str]
    reason: Mapped[str | None]
    message: Mapped[str | None]
    suite_id: Mapped[str] = mapped_column(ForeignKey("suites.id"))
    spec: Mapped[dict[str, Any]]
    adjustments: Mapped[list[Any]]
    priority: Mapped[int]
    gpus: Mapped[int]
    # What makes jobs comparable when durations are estimated, and how many steps this one has.
    workload: Mapped[str] = mapped_column(default="")
    steps: Mapped[int] = mapped_column(default=1)
    active_seconds: Mapped[float] = mapped_column(default=0.0, server_default="0")
    not_before: Mapped[Timestamp | None]
    yielding_to: Mapped[str | None]
    waiting: Mapped[dict[str, Any] | None]
    progress: Mapped[dict[str, Any]]
    result: Mapped[dict[str, Any] | None]
    attempts: Mapped[int] = mapped_column(default=0)
    last_event_seq: Mapped[int] = mapped_column(default=0)
    trimmed: Mapped[bool] = mapped_column(default=False, server_default=false())
    idempotency_key: Mapped[str | None]
    request_hash: Mapped[str]
    sweep_id: Mapped[str | None] = mapped_column(ForeignKey("sweeps.id"), index=True)
    arm: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    created_at: Mapped[CreatedAt]
    started_at: Mapped[Timestamp | None]
    finished_at: Mapped[Timestamp | None]
