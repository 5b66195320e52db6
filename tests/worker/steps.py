"""What tests let a worker do."""

import asyncio

from app.artifacts import blobs
from app.db.engine import create_engine, create_sessions
from worker.supervisor.export_run import run_next_export
from worker.supervisor.training_run import run_next_job


def work(context):
    """Run the next job; whether there was one."""
    return asyncio.run(run_next_job(context)).lease is not None


def export(context):
    """Run the next export; whether there was one."""
    return asyncio.run(run_next_export(context))


def sweep(context):
    """Remove files that nothing points to."""
    sessions = create_sessions(create_engine(context.database_url, pooled=False))
    return asyncio.run(blobs.sweep(sessions, context.storage))
