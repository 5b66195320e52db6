"""A worker's context with scripted children, and jobs for it."""

import asyncio
import threading
from pathlib import Path

import pytest

from app.scheduling.retries import RetryPolicy
from app.storage import DirectoryStorage
from tests.workers import register
from worker.supervisor.context import WorkerContext


@pytest.fixture
def context(settings):
    context = WorkerContext(
        worker_id="test-worker",
        database_url=settings.sqlalchemy_url,
        storage=DirectoryStorage(Path(settings.storage)),
        runs_dir=settings.runs_dir,
        lease_seconds=5,
        stall_seconds=60,
        retry_policy=RetryPolicy(max_attempts=2, back_off_seconds=0),
        stopping=threading.Event(),
        ollama_urls=("http://ollama:1", "http://other:1"),
        training_module="tests.worker.scripted_trainer",
        export_module="tests.worker.scripted_export",
    )
    asyncio.run(register(settings.sqlalchemy_url, context.worker_id))
    return context


@pytest.fixture
def submit(api, suite, job_spec):
    def go(name, **changes):
        response = api.post("/jobs", json={**job_spec, "name": name, **changes})
        assert response.status_code == 201, response.text
        return response.json()["id"]

    return go
