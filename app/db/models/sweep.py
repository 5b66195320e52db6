"""A grid of jobs."""

from typing import Any

from sqlalchemy import JSON, Index
from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import Arrival, Base, CreatedAt


class SweepRow(Base):
    """A grid of matched jobs; each of them points here."""

    __tablename__ = "sweeps"
    __table_args__ = (Index("ix_sweeps_team_arrival", "team", "arrival"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    arrival: Mapped[Arrival]
    team: Mapped[str]
    name: Mapped[str]
    # JSON, not JSONB: the order of the grid's fields is the order of the table's columns.
    grid: Mapped[dict[str, Any]] = mapped_column(JSON)
    created_at: Mapped[CreatedAt]
