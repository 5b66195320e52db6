"""what admission knows of a suite's cases"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = '0005'
down_revision: str | Sequence[str] | None = '0004'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column('suites', sa.Column('profile', sa.JSON(), nullable=True))


def downgrade() -> None:
    op.drop_column('suites', 'profile')
