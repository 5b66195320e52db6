"""What a worker process knows about itself."""

import threading
from dataclasses import dataclass
from pathlib import Path

from app.scheduling.retries import RetryPolicy
from app.storage import Storage


@dataclass(frozen=True)
class WorkerContext:
    """Built once at start.

    Attributes:
        stopping: Set when the process is told to stop: running work goes back to the queue.
        training_module: What a training child runs; given its run directory.
        export_module: What an export child runs; given its run directory.
    """

    worker_id: str
    database_url: str
    storage: Storage
    runs_dir: Path
    lease_seconds: float
    stall_seconds: float
    retry_policy: RetryPolicy
    stopping: threading.Event
    ollama_urls: tuple[str, ...] = ()
    training_module: str = "worker.training"
    export_module: str = "worker.training.export"
