"""attempts of exports"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = '0003'
down_revision: str | Sequence[str] | None = '0002'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.rename_table('loose_objects', 'orphan_blobs')
    op.execute('ALTER TABLE orphan_blobs RENAME CONSTRAINT pk_loose_objects TO pk_orphan_blobs')
    op.execute('ALTER INDEX ix_loose_objects_due RENAME TO ix_orphan_blobs_due')

    op.add_column('exports', sa.Column('kind', sa.String(), nullable=True))
    op.execute(
        "UPDATE exports SET kind = CASE WHEN spec ->> 'type' = 'generation' "
        "THEN 'generation' ELSE 'export' END"
    )
    op.execute("UPDATE exports SET name = id WHERE kind = 'generation'")
    op.alter_column('exports', 'kind', nullable=False)

    op.add_column('attempts', sa.Column('kind', sa.String(), nullable=True))
    op.add_column('attempts', sa.Column('work_id', sa.String(), nullable=True))
    op.execute("UPDATE attempts SET kind = 'train', work_id = job_id")
    op.alter_column('attempts', 'kind', nullable=False)
    op.alter_column('attempts', 'work_id', nullable=False)
    op.drop_constraint('uq_attempts_job_id_number', 'attempts', type_='unique')
    op.drop_index('uq_attempts_owner', table_name='attempts')
    op.create_unique_constraint(
        op.f('uq_attempts_work_id_number'), 'attempts', ['work_id', 'number']
    )
    op.create_index(
        'uq_attempts_owner', 'attempts', ['work_id'], unique=True,
        postgresql_where=sa.text('ended_at IS NULL'),
    )
    op.create_index('ix_attempts_job', 'attempts', ['job_id'], unique=False)
    # A worker that runs an export meanwhile keeps its lease.
    op.execute(
        "INSERT INTO attempts (id, kind, work_id, job_id, number, team, worker_id, gpus, "
        "gpu_indexes, lease_token, heartbeats, relayed) "
        "SELECT 'attempt_' || substr(md5(e.id || e.lease_token), 1, 20), e.kind, e.id, e.job_id, "
        "greatest(e.attempts, 1), j.team, 'unknown', 0, '[]', e.lease_token, e.heartbeats, "
        "e.relayed FROM exports e JOIN jobs j ON j.id = e.job_id "
        "WHERE e.status = 'running' AND e.lease_token IS NOT NULL"
    )
    op.drop_column('exports', 'lease_token')
    op.drop_column('exports', 'heartbeats')
    op.drop_column('exports', 'relayed')

    op.execute(
        "UPDATE jobs SET waiting = (waiting - 'obstacle') || "
        "jsonb_build_object('wait_reason', waiting -> 'obstacle') WHERE waiting ? 'obstacle'"
    )


def downgrade() -> None:
    op.execute(
        "UPDATE jobs SET waiting = (waiting - 'wait_reason') || "
        "jsonb_build_object('obstacle', waiting -> 'wait_reason') WHERE waiting ? 'wait_reason'"
    )

    op.add_column('exports', sa.Column('relayed', sa.BigInteger(), nullable=True))
    op.add_column('exports', sa.Column('heartbeats', sa.Integer(), nullable=True))
    op.add_column('exports', sa.Column('lease_token', sa.String(), nullable=True))
    op.execute(
        "UPDATE exports e SET lease_token = a.lease_token, heartbeats = a.heartbeats, "
        "relayed = a.relayed FROM attempts a WHERE a.work_id = e.id AND a.ended_at IS NULL"
    )
    op.execute("UPDATE exports SET heartbeats = coalesce(heartbeats, 0), "
               "relayed = coalesce(relayed, 0)")
    op.alter_column('exports', 'heartbeats', nullable=False)
    op.alter_column('exports', 'relayed', nullable=False)
    op.execute("DELETE FROM attempts WHERE kind <> 'train'")
    op.drop_index('ix_attempts_job', table_name='attempts')
    op.drop_index('uq_attempts_owner', table_name='attempts')
    op.drop_constraint('uq_attempts_work_id_number', 'attempts', type_='unique')
    op.drop_column('attempts', 'work_id')
    op.drop_column('attempts', 'kind')
    op.create_unique_constraint(
        op.f('uq_attempts_job_id_number'), 'attempts', ['job_id', 'number']
    )
    op.create_index(
        'uq_attempts_owner', 'attempts', ['job_id'], unique=True,
        postgresql_where=sa.text('ended_at IS NULL'),
    )

    op.execute(
        "UPDATE exports SET name = replace(id, 'generation_', 'generation-') "
        "WHERE kind = 'generation'"
    )
    op.drop_column('exports', 'kind')

    op.execute('ALTER INDEX ix_orphan_blobs_due RENAME TO ix_loose_objects_due')
    op.execute('ALTER TABLE orphan_blobs RENAME CONSTRAINT pk_orphan_blobs TO pk_loose_objects')
    op.rename_table('orphan_blobs', 'loose_objects')
