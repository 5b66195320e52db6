"""One try at a job, an export or a generation: the lease, and what it used."""

from typing import Any

from sqlalchemy import BigInteger, Index, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import Base, CreatedAt, Timestamp

OPEN = text("ended_at IS NULL")


class AttemptRow(Base):
    """One try of a job, an export or a generation on a worker.

    It is the lease while it runs, and the record of GPU time for ever: it outlives its job, and
    deleting a job gives no GPU time back.
    """

    __tablename__ = "attempts"
    __table_args__ = (
        UniqueConstraint("work_id", "number"),
        # The database itself refuses a second owner.
        Index("uq_attempts_owner", "work_id", unique=True, postgresql_where=OPEN),
        Index("ix_attempts_worker", "worker_id", "started_at"),
        Index("ix_attempts_ended", "ended_at"),
        Index("ix_attempts_job", "job_id"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str]
    # The job itself, or one of its exports or generations.
    work_id: Mapped[str]
    job_id: Mapped[str]
    number: Mapped[int]
    team: Mapped[str]
    worker_id: Mapped[str]
    gpus: Mapped[int]
    gpu_indexes: Mapped[list[Any]]
    lease_token: Mapped[str] = mapped_column(unique=True)
    # Grows while the worker is alive. A lease that has stood still for long is over; no clock of
    # any host is compared with another one's.
    heartbeats: Mapped[int] = mapped_column(default=0)
    # Bytes of the run's events file that are stored.
    relayed: Mapped[int] = mapped_column(BigInteger, default=0)
    outcome: Mapped[str | None]
    started_at: Mapped[CreatedAt]
    ended_at: Mapped[Timestamp | None]
