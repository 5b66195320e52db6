from typing import Any

from sqlalchemy import JSON, ForeignKey, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import Arrival, Base, CreatedAt, Timestamp


class JobRow(Base):
    """One training run. `status` is written by `app.jobs.lifecycle` alone."""

    __tablename__ = "jobs"
    __table_args__ = (
        UniqueConstraint("team", "idempotency_key"),
        Index("ix_jobs_queue", "status", "priority", "arrival"),
        Index("ix_jobs_team_arrival", "team", "arrival"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    arrival: Mapped[Arrival]
    team: Mapped[str]
    name: Mapped[str] = mapped_column(index=True)
    status: Mapped[str]
    reason: Mapped[str | None]
    message: Mapped[str | None]
    suite_id: Mapped[str] = mapped_column(ForeignKey("suites.id"))
    spec: Mapped[dict[str, Any]]
    adjustments: Mapped[list[Any]]
    priority: Mapped[int]
    gpus: Mapped[int]
    progress: Mapped[dict[str, Any]]
    result: Mapped[dict[str, Any] | None]
    attempts: Mapped[int] = mapped_column(default=0)
    last_event_seq: Mapped[int] = mapped_column(default=0)
    idempotency_key: Mapped[str | None]
    request_hash: Mapped[str]
    sweep_id: Mapped[str | None] = mapped_column(ForeignKey("sweeps.id"), index=True)
    arm: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    created_at: Mapped[CreatedAt]
    started_at: Mapped[Timestamp | None]
    finished_at: Mapped[Timestamp | None]
