"""A live service and a worker whose children are scripted. Worlds that need them import these."""

import asyncio
import threading
import time
from pathlib import Path

import pytest
import structlog
import uvicorn

from app.main import create_app
from app.scheduling.retries import RetryPolicy
from app.storage import DirectoryStorage
from tests.waiting import wait_for
from tests.worker.steps import export, work
from tests.workers import register
from worker.supervisor.context import WorkerContext


@pytest.fixture
def context(settings):
    """Of a worker that is registered."""
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
    """Submits a job whose name is the script of its training; returns its id."""

    def go(name, **changes):
        response = api.post("/jobs", json={**job_spec, "name": name, **changes})
        assert response.status_code == 201, response.text
        return response.json()["id"]

    return go


@pytest.fixture
def service(settings):
    """The address of a service that listens."""
    config = uvicorn.Config(create_app(settings), port=0, log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_for(lambda: server.started)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


@pytest.fixture
def worker(context):
    """Runs jobs and exports meanwhile, without a word."""
    stop = threading.Event()

    def loop():
        while not stop.is_set():
            if not work(context) and not export(context):
                time.sleep(0.05)

    thread = threading.Thread(target=loop)
    with structlog.testing.capture_logs():
        thread.start()
        yield context
        stop.set()
        thread.join()
