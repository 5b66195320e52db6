"""heartbeats of the scheduler, idempotency keys of sweeps"""

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
    op.add_column('sweeps', sa.Column('idempotency_key', sa.String(), nullable=True))
    op.add_column('sweeps', sa.Column('request_hash', sa.String(), nullable=True))
    op.create_unique_constraint(
        op.f('uq_sweeps_team_idempotency_key'), 'sweeps', ['team', 'idempotency_key']
    )


def downgrade() -> None:
    op.drop_constraint(op.f('uq_sweeps_team_idempotency_key'), 'sweeps', type_='unique')
    op.drop_column('sweeps', 'request_hash')
    op.drop_column('sweeps', 'idempotency_key')
    op.drop_table('heartbeats')
