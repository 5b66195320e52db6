"""A stored rollout."""

from sqlalchemy import BigInteger, ForeignKey, Identity, Index, LargeBinary
from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import Base


class RolloutRow(Base):
    """One whole rollout, zlib-compressed JSON."""

    __tablename__ = "rollouts"
    __table_args__ = (Index("ix_rollouts_page", "job_id", "phase", "arrival"),)

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    id: Mapped[str] = mapped_column(primary_key=True)
    arrival: Mapped[int] = mapped_column(BigInteger, Identity())
    phase: Mapped[str]
    step: Mapped[int]
    content: Mapped[bytes] = mapped_column(LargeBinary)
