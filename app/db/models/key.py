"""An API key, as its hash."""

from sqlalchemy import ForeignKey
from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import Arrival, Base, CreatedAt, Timestamp


class KeyRow(Base):
    """An API key. Only its hash is kept; the prefix is for recognizing it."""

    __tablename__ = "keys"

    id: Mapped[str] = mapped_column(primary_key=True)
    arrival: Mapped[Arrival]
    team: Mapped[str] = mapped_column(ForeignKey("teams.name"), index=True)
    name: Mapped[str]
    role: Mapped[str]
    prefix: Mapped[str]
    sha256: Mapped[str] = mapped_column(unique=True)
    requests_per_minute: Mapped[int | None]
    created_at: Mapped[CreatedAt]
    expires_at: Mapped[Timestamp | None]
    revoked_at: Mapped[Timestamp | None]
