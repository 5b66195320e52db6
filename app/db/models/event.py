"""A line of a job's history."""

from typing import Any

from sqlalchemy import BigInteger, ForeignKey, Index
from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import Base, CreatedAt


class EventRow(Base):
    """One line of a job's history."""

    __tablename__ = "events"
    __table_args__ = (Index("ix_events_type", "job_id", "type", "seq"),)

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    seq: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    type: Mapped[str]
    data: Mapped[dict[str, Any]]
    time: Mapped[CreatedAt]
