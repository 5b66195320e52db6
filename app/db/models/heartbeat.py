"""A part of the service that is no worker, as it has last shown itself."""

from sqlalchemy import JSON
from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import Base, Timestamp


class HeartbeatRow(Base):
    """Schedulers: they do each other's work, so they share a row."""

    __tablename__ = "heartbeats"

    name: Mapped[str] = mapped_column(primary_key=True)
    seen_at: Mapped[Timestamp]
    problems: Mapped[dict[str, str]] = mapped_column(JSON)
