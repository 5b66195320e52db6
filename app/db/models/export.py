"""A follow-up task of a job: an export, or a question to what it trained."""

from typing import Any

from sqlalchemy import ForeignKey, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import Arrival, Base, CreatedAt, Timestamp


class ExportRow(Base):
    """A follow-up task of a job: an export, or a question to its agent (`kind`).

    `status` is written by `app.lifecycle.exports` alone.
    """

    __tablename__ = "exports"
    __table_args__ = (
        UniqueConstraint("job_id", "name"),
        Index("ix_exports_queue", "status", "arrival"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str]
    arrival: Mapped[Arrival]
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    name: Mapped[str]
    spec: Mapped[dict[str, Any]]
    status: Mapped[str]
    reason: Mapped[str | None]
    message: Mapped[str | None]
    result: Mapped[dict[str, Any] | None]
    # Since it was last asked for.
    attempts: Mapped[int] = mapped_column(default=0)
    not_before: Mapped[Timestamp | None]
    created_at: Mapped[CreatedAt]
    finished_at: Mapped[Timestamp | None]
