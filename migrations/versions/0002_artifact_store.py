"""artifact store"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = '0002'
down_revision: str | Sequence[str] | None = '0001'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table('loose_objects',
    sa.Column('sha256', sa.String(), nullable=False),
    sa.Column('due', sa.DateTime(timezone=True), nullable=False),
    sa.PrimaryKeyConstraint('sha256', name=op.f('pk_loose_objects'))
    )
    op.create_index(op.f('ix_loose_objects_due'), 'loose_objects', ['due'], unique=False)
    op.create_table('suite_names',
    sa.Column('team', sa.String(), nullable=False),
    sa.Column('name', sa.String(), nullable=False),
    sa.Column('versions', sa.Integer(), nullable=False),
    sa.PrimaryKeyConstraint('team', 'name', name=op.f('pk_suite_names'))
    )
    op.execute(
        "INSERT INTO suite_names (team, name, versions) "
        "SELECT team, name, max(version) FROM suites GROUP BY team, name"
    )
    # One list of reports, instead of a field for each.
    op.execute(
        "UPDATE exports SET result = (result - 'export' - 'ollama_parity') || jsonb_build_object("
        "'parity', "
        "CASE WHEN result ? 'parity' THEN jsonb_build_array(result -> 'parity') "
        "ELSE '[]'::jsonb END || "
        "CASE WHEN result ? 'ollama_parity' THEN jsonb_build_array(result -> 'ollama_parity') "
        "ELSE '[]'::jsonb END) "
        "WHERE jsonb_typeof(result) = 'object' AND spec ->> 'type' != 'generation'"
    )
    op.create_index(op.f('ix_artifacts_sha256'), 'artifacts', ['sha256'], unique=False)
    op.add_column('exports', sa.Column('not_before', sa.DateTime(timezone=True), nullable=True))
    op.create_index(op.f('ix_suites_storage_key'), 'suites', ['storage_key'], unique=False)
    op.add_column('teams', sa.Column('keep_files_days', sa.Double(), nullable=True))


def downgrade() -> None:
    op.drop_column('teams', 'keep_files_days')
    op.drop_index(op.f('ix_suites_storage_key'), table_name='suites')
    op.drop_column('exports', 'not_before')
    op.drop_index(op.f('ix_artifacts_sha256'), table_name='artifacts')
    op.drop_table('suite_names')
    op.drop_index(op.f('ix_loose_objects_due'), table_name='loose_objects')
    op.drop_table('loose_objects')
