"""A team and its limits."""

from sqlalchemy import BigInteger
from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import Base, CreatedAt


class TeamRow(Base):
    """Who shares the GPUs, with a weight and limits (None: no limit)."""

    __tablename__ = "teams"

    name: Mapped[str] = mapped_column(primary_key=True)
    weight: Mapped[float] = mapped_column(default=1.0, server_default="1")
    max_running_gpus: Mapped[int | None]
    max_queued_jobs: Mapped[int | None]
    gpu_seconds_per_day: Mapped[float | None]
    gpu_seconds_per_month: Mapped[float | None]
    max_storage_bytes: Mapped[int | None] = mapped_column(BigInteger)
    keep_files_days: Mapped[float | None]
    created_at: Mapped[CreatedAt]
