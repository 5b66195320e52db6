"""Workers that are only rows: alive, with so many GPUs."""

from app.db.engine import create_engine, create_sessions, unit_of_work
from app.workers.repository import Presence, beat


def presence(gpus=0, gpu_type=None, gpu_memory_gb=None, labels=(), queue="training"):
    return Presence(
        hostname="here",
        pid=1,
        queue=queue,
        gpus=gpus,
        gpu_type=gpu_type,
        gpu_memory_gb=gpu_memory_gb,
        labels=list(labels),
        versions={},
    )


async def register(database_url, worker_id, **values):
    engine = create_engine(database_url, pooled=False)
    async with unit_of_work(create_sessions(engine)) as session:
        await beat(session, worker_id, presence(**values))
