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
    started_at: Mapped[CreatedAt]
    heartbeat_at: Mapped[Timestamp]
