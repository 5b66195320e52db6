from typing import Any

from sqlalchemy import BigInteger, ForeignKey, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import Arrival, Base, CreatedAt, Timestamp


class ExportRow(Base):
    """A follow-up task with its own state, attempts and lease."""

    __tablename__ = "exports"
    __table_args__ = (
        UniqueConstraint("job_id", "name"),
        Index("ix_exports_queue", "status", "arrival"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    arrival: Mapped[Arrival]
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    name: Mapped[str]
    spec: Mapped[dict[str, Any]]
    status: Mapped[str]
    reason: Mapped[str | None]
    message: Mapped[str | None]
    result: Mapped[dict[str, Any] | None]
    attempts: Mapped[int] = mapped_column(default=0)
    not_before: Mapped[Timestamp | None]
    lease_token: Mapped[str | None]
    heartbeats: Mapped[int] = mapped_column(default=0)
    relayed: Mapped[int] = mapped_column(BigInteger, default=0)
    created_at: Mapped[CreatedAt]
    finished_at: Mapped[Timestamp | None]
