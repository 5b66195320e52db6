"""Import worlds, proved in a fresh process: import-linter does not see what packages pull in."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "trl", "peft", "datasets", "xllamacpp")
SERVERS = ("fastapi", "sqlalchemy", "celery", "redis", "psycopg")


def loaded_by(module):
    code = f"import sys, {module}; print(*{{name.split('.')[0] for name in sys.modules}})"
    environment = {
        "PATH": "/usr/bin:/bin",
        "DRESSAGE_DATABASE_URL": "postgresql://x",
        "DRESSAGE_REDIS_URL": "redis://x",
        "DRESSAGE_STORAGE": "/tmp",
        "DRESSAGE_RUNS_DIR": "/tmp",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("dressage.authoring", (*HEAVY, *SERVERS, "httpx2")),
        ("dressage.spec.job", (*HEAVY, *SERVERS, "httpx2")),
        ("dressage.client", (*HEAVY, *SERVERS)),
        ("dressage.cli.main", (*HEAVY, *SERVERS)),
        ("dressage.sandbox.inside", (*HEAVY, *SERVERS, "httpx2")),
        ("app.main", HEAVY),
        ("worker.celery_app", HEAVY),
        ("worker.scheduler", HEAVY),
        ("worker.training.rewards.weighted", (*HEAVY, *SERVERS, "app")),
        ("worker.training.process.boundary", (*HEAVY, *SERVERS, "app")),
        ("worker.training.pipeline.run", (*SERVERS, "app")),
    ],
)
def test_what_a_module_must_not_load(module, forbidden):
    assert not loaded_by(module) & set(forbidden)
