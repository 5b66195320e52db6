from sqlalchemy import ForeignKey, Index, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import Base, CreatedAt, Timestamp

OPEN = text("ended_at IS NULL")


class AttemptRow(Base):
    """One try of a job on a worker, and the worker's lease on it."""

    __tablename__ = "attempts"
    __table_args__ = (
        UniqueConstraint("job_id", "number"),
        # The database itself refuses a second owner.
        Index("uq_attempts_owner", "job_id", unique=True, postgresql_where=OPEN),
        Index("ix_attempts_lease", "lease_expires_at", postgresql_where=OPEN),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    number: Mapped[int]
    worker_id: Mapped[str]
    lease_token: Mapped[str] = mapped_column(unique=True)
    lease_expires_at: Mapped[Timestamp]
    outcome: Mapped[str | None]
    started_at: Mapped[CreatedAt]
    ended_at: Mapped[Timestamp | None]
