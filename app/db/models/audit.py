"""Who changed what."""

from sqlalchemy import BigInteger, Identity, Index
from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import Base, CreatedAt


class AuditRow(Base):
    """One change that somebody made through the API."""

    __tablename__ = "audit"
    __table_args__ = (Index("ix_audit_team_arrival", "team", "arrival"),)

    arrival: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    team: Mapped[str]
    key_id: Mapped[str]
    action: Mapped[str]
    target: Mapped[str]
    time: Mapped[CreatedAt]
