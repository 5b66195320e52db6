"""A version of a suite, and the last version number of each name."""

from typing import Any

from sqlalchemy import JSON, BigInteger, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from app.db.base import Arrival, Base, CreatedAt


class SuiteNameRow(Base):
    """How many versions a name has had: a number is never given twice, also after a deletion."""

    __tablename__ = "suite_names"

    team: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    versions: Mapped[int] = mapped_column(default=0)


class SuiteRow(Base):
    """One immutable version of a suite; its content lies in the artifact store."""

    __tablename__ = "suites"
    __table_args__ = (
        UniqueConstraint("team", "name", "version"),
        UniqueConstraint("team", "name", "content_hash"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    arrival: Mapped[Arrival]
    team: Mapped[str]
    name: Mapped[str]
    version: Mapped[int]
    content_hash: Mapped[str]
    storage_key: Mapped[str] = mapped_column(index=True)
    case_count: Mapped[int]
    size: Mapped[int] = mapped_column(BigInteger, default=0)
    # JSON, not JSONB: the order of keys is part of what a chat template renders.
    tools: Mapped[list[Any]] = mapped_column(JSON)
    environments: Mapped[list[Any]] = mapped_column(JSON)
    measures: Mapped[list[Any]]
    reward_functions: Mapped[list[Any]]
    rollout_funcs: Mapped[list[Any]]
    # `dressage.measuring.profile.SuiteProfile`; null: stored before there was one.
    profile: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    created_at: Mapped[CreatedAt]

    @property
    def repeated_cases(self) -> int:
        """Cases that ask and expect what an earlier one does."""
        return int(self.profile["repeated"]["count"]) if self.profile else 0
