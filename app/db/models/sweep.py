"""A grid of jobs."""

from typing import Any

from sqlalchemy import JSON, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import Arrival, Base, CreatedAt


class SweepRow(Base):
    """A grid of matched jobs; each of them points here."""

    __tablename__ = "sweeps"
    __table_args__ = (
        Index("ix_sweeps_team_arrival", "team", "arrival"),
        UniqueConstraint("team", "idempotency_key"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    arrival: Mapped[Arrival]
    team: Mapped[str]
    name: Mapped[str]
    # JSON, not JSONB: the order of the grid's fields is the order of the table's columns.
    grid: Mapped[dict[str, Any]] = mapped_column(JSON)
    idempotency_key: Mapped[str | None]
    request_hash: Mapped[str | None]
    created_at: Mapped[CreatedAt]
