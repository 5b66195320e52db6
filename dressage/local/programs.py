"""The programs of the service, as `python -m` knows them.

They are named here and nowhere else in this package: import-linter cannot see names in strings, so
a test looks whether each of them exists.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec

from dressage.local.errors import LaunchError
from dressage.local.process import Program

CHECK_STORAGE = "app.admin.check_storage"
MIGRATE = "app.admin.migrate"
FIRST_KEY = "app.admin.first_key"
API = "app.main"
SCHEDULER = "worker.scheduler"
WORKER = "worker.celery_app"
PRESENCE = "worker.presence"
MODULES = (CHECK_STORAGE, MIGRATE, FIRST_KEY, API, SCHEDULER, WORKER, PRESENCE)


def require_programs() -> None:
    """Check that the service is installed beside its client.

    Raises:
        LaunchError: It is not.
    """
    if any(find_spec(module.split(".")[0]) is None for module in MODULES):
        raise LaunchError(
            "only the client is installed here; the service runs from a checkout (scripts/setup, "
            "then .venv/bin/dressage up) or from its image"
        )


def run_module(module: str, environment: Mapping[str, str], *arguments: str) -> str:
    """Run a program to its end. Returns what it prints.

    Raises:
        LaunchError: It fails; with its last line, which is a sentence.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise LaunchError(lines[-1] if lines else f"{module} failed")
    return done.stdout


def service_programs(
    environment: dict[str, str], *, host: str, port: int, ready: Callable[[], bool]
) -> list[Program]:
    """API, scheduler and workers, in the order in which they start."""
    threads = int(run_module(PRESENCE, environment))
    api = (
        *(sys.executable, "-m", "uvicorn", "--factory", f"{API}:create_app"),
        *("--host", host, "--port", str(port), "--no-access-log"),
        *("--timeout-graceful-shutdown", "3"),
    )
    return [
        Program("api", api, environment, ready=ready),
        Program("scheduler", (sys.executable, "-m", SCHEDULER), environment),
        Program("training-worker", _celery("training", threads), environment),
        Program("export-worker", _celery("exports", 1), environment),
    ]


def _celery(queue: str, threads: int) -> tuple[str, ...]:
    return (
        *(sys.executable, "-m", "celery", "-A", WORKER, "worker", "-Q", queue),
        *("--pool", "threads", "-c", str(threads), "-n", f"{queue}@%h"),
        *("--loglevel", "WARNING"),
        *("--without-gossip", "--without-mingle", "--without-heartbeat"),
    )
