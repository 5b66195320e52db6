"""A webhook, and the messages for it."""

from typing import Any

from sqlalchemy import ForeignKey, Index, text
from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import Arrival, Base, CreatedAt, Timestamp


class WebhookRow(Base):
    """An address that is told when a team's jobs change their status."""

    __tablename__ = "webhooks"

    id: Mapped[str] = mapped_column(primary_key=True)
    arrival: Mapped[Arrival]
    team: Mapped[str] = mapped_column(index=True)
    url: Mapped[str]
    secret: Mapped[str]
    statuses: Mapped[list[Any]]
    created_at: Mapped[CreatedAt]


class DeliveryRow(Base):
    """One message to a webhook, with what became of it."""

    __tablename__ = "deliveries"
    __table_args__ = (
        Index("ix_deliveries_due", "next_at", postgresql_where=text("status = 'pending'")),
        Index("ix_deliveries_webhook", "webhook_id", "arrival"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    arrival: Mapped[Arrival]
    webhook_id: Mapped[str] = mapped_column(ForeignKey("webhooks.id", ondelete="CASCADE"))
    payload: Mapped[dict[str, Any]]
    status: Mapped[str] = mapped_column(default="pending")
    attempts: Mapped[int] = mapped_column(default=0)
    next_at: Mapped[Timestamp]
    last_status: Mapped[int | None]
    last_error: Mapped[str | None]
    created_at: Mapped[CreatedAt]
    finished_at: Mapped[Timestamp | None]
