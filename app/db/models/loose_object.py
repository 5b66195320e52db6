from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import Base, Timestamp


class LooseObjectRow(Base):
    """A file of the artifact store that nothing may point to: about to be stored, or let go."""

    __tablename__ = "loose_objects"

    sha256: Mapped[str] = mapped_column(primary_key=True)
    due: Mapped[Timestamp] = mapped_column(index=True)
