"""A file of the store that nothing points to any longer, perhaps."""

from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import Base, Timestamp


class OrphanBlobRow(Base):
    """A file of the artifact store to which perhaps no row points (any longer, or yet)."""

    __tablename__ = "orphan_blobs"

    sha256: Mapped[str] = mapped_column(primary_key=True)
    due: Mapped[Timestamp] = mapped_column(index=True)
