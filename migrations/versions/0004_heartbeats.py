"""heartbeats of the scheduler"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = '0004'
down_revision: str | Sequence[str] | None = '0003'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        'heartbeats',
        sa.Column('name', sa.String(), nullable=False),
        sa.Column('seen_at', sa.DateTime(timezone=True), nullable=False),
        sa.Column('problems', sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint('name', name=op.f('pk_heartbeats')),
    )


def downgrade() -> None:
    op.drop_table('heartbeats')
