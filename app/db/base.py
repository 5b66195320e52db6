"""What all tables share."""

import secrets
from datetime import datetime
from typing import Annotated, Any, ClassVar

from sqlalchemy import BigInteger, ColumnElement, DateTime, Identity, MetaData, String, func, true
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, mapped_column

Timestamp = Annotated[datetime, mapped_column(DateTime(timezone=True))]
CreatedAt = Annotated[
    datetime, mapped_column(DateTime(timezone=True), server_default=func.clock_timestamp())
]
# Order of arrival: first come first served, and the position of cursors.
Arrival = Annotated[int, mapped_column(BigInteger, Identity(), unique=True)]


class Base(DeclarativeBase):
    """Constraint names are fixed, so that migrations can name them."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(column_0_N_label)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        dict[str, Any]: JSONB,
        list[Any]: JSONB,
        str: String,
    }


def visible(team_column: Any, team: str | None) -> ColumnElement[bool]:
    """The condition that a row is of a team; None: of any."""
    return true() if team is None else team_column == team


def new_id(prefix: str) -> str:
    """An unguessable id that says what it is of."""
    return f"{prefix}_{secrets.token_hex(10)}"
