"""A worker as its last heartbeat has shown it."""

from typing import Any

from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import Base, CreatedAt, Timestamp


class WorkerRow(Base):
    """A process that takes work."""

    __tablename__ = "workers"

    id: Mapped[str] = mapped_column(primary_key=True)
    hostname: Mapped[str]
    pid: Mapped[int]
    queue: Mapped[str]
    gpus: Mapped[int]
    gpu_type: Mapped[str | None]
    gpu_memory_gb: Mapped[float | None]
    labels: Mapped[list[Any]]
    versions: Mapped[dict[str, Any]]
    state: Mapped[str] = mapped_column(default="active", server_default="active")
    state_reason: Mapped[str | None]
    started_at: Mapped[CreatedAt]
    heartbeat_at: Mapped[Timestamp]
