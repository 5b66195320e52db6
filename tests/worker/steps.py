"""What tests let a worker do."""

import asyncio

from app.artifacts import objects
from app.db.engine import create_engine, create_sessions
from worker.supervisor.run_export import run_next_export
from worker.supervisor.run_job import run_next_job


def work(context):
    """Run the next job; whether there was one."""
    return asyncio.run(run_next_job(context)).lease is not None


def export(context):
    """Run the next export; whether there was one."""
    return asyncio.run(run_next_export(context))


def sweep(context):
    """Remove files that nothing points to."""
    sessions = create_sessions(create_engine(context.database_url, pooled=False))
    return asyncio.run(objects.sweep(sessions, context.storage))
