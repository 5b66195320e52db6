"""Real servers for all tests: PostgreSQL and Valkey on unix sockets, one database per test."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import hypothesis
import psycopg
import pytest
from fastapi.testclient import TestClient

from app.main import create_app
from app.settings import Settings
from dressage.authoring import Suite
from dressage.stack.account import database_account
from dressage.stack.program import KeptProgram
from dressage.stack.servers import Postgres, Valkey, run_directory

ROOT = Path(__file__).resolve().parent.parent
ARITHMETIC = ROOT / "examples" / "arithmetic"
TINY_MODEL = ROOT / "examples" / "tiny_agent" / "model"

# Of team `default`, in every test's database.
KEYS = {role: f"drs_{role}_of_the_tests" for role in ("operator", "submitter", "viewer")}

# How long an example takes says nothing on a busy machine.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")


@pytest.fixture(scope="session")
def servers():
    """A directory with running servers; `.postgres` has the template database `migrated`."""
    # Not below pytest's own folder: as root the servers run as another user, who cannot get there.
    root = Path(tempfile.mkdtemp(prefix="dressage-tests-"))
    root.chmod(0o711)
    account = database_account()
    for name in ("logs", "programs"):
        (root / name).mkdir()
    run_directory(root, account)
    postgres, valkey = Postgres(root, account), Valkey(root, account)
    postgres.initialise()
    kept = [KeptProgram(server.program(), root / "logs") for server in (postgres, valkey)]
    for program in kept:
        program.start()
        while not program.program.ready():
            assert program.pid, program.last_lines()
    postgres.create_database()
    environment = {**os.environ, **service_environment(postgres.url, valkey.url, root)}
    subprocess.run([sys.executable, "-m", "app.db.migrate"], env=environment, check=True)
    with psycopg.connect(postgres.url) as connection:
        for role, key in KEYS.items():
            connection.execute(
                "INSERT INTO keys (id, team, name, role, prefix, sha256) "
                "VALUES (%s, 'default', '', %s, %s, %s)",
                (f"key_{role}", role, key[:12], hashlib.sha256(key.encode()).hexdigest()),
            )
    yield postgres, valkey
    for program in kept:
        program.stop()
    shutil.rmtree(root)


def service_environment(database_url, redis_url, folder):
    return {
        "DRESSAGE_DATABASE_URL": database_url,
        "DRESSAGE_REDIS_URL": redis_url,
        "DRESSAGE_STORAGE": str(folder / "artifacts"),
        "DRESSAGE_RUNS_DIR": str(folder / "runs"),
    }


@pytest.fixture
def database_url(servers):
    """A fresh database, built by the migrations."""
    url = servers[0].url
    name = f"test_{uuid.uuid4().hex}"
    admin = url.replace("/dressage?", "/postgres?")
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE dressage")
    yield url.replace("/dressage?", f"/{name}?")
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def settings(database_url, servers, tmp_path):
    return Settings(
        database_url=database_url,
        redis_url=servers[1].url,
        storage=str(tmp_path / "artifacts"),
        runs_dir=tmp_path / "runs",
        max_upload_bytes=2_000_000,
        requests_per_minute=0,
    )


@pytest.fixture
def api(settings):
    """The service, asked by an operator."""
    app = create_app(settings)
    with TestClient(app, raise_server_exceptions=False, headers=bearer("operator")) as client:
        yield client


def bearer(role):
    return {"Authorization": f"Bearer {KEYS[role]}"}


@pytest.fixture(scope="session")
def arithmetic():
    return Suite.from_path(ARITHMETIC)


@pytest.fixture
def suite(api, arithmetic):
    """The arithmetic suite, uploaded."""
    response = api.post("/suites", params={"name": "arithmetic"}, content=arithmetic.to_archive())
    assert response.status_code == 201, response.text
    return response.json()


@pytest.fixture
def job_spec():
    """A small job on the tiny model that every check accepts."""
    return {
        "name": "small",
        "agent": {
            "model": str(TINY_MODEL),
            "instructions": "Solve the exercise. Use the calculator.",
            "tools": ["calculate"],
        },
        "suite": "arithmetic",
        "rewards": [{"measure": "correct_answer"}],
        "training": {
            "max_steps": 2,
            "batch_size": 8,
            "gradient_accumulation": 1,
            "num_generations": 4,
            "max_completion_length": 60,
            "max_tool_iterations": 2,
            "temperature": 1.0,
            "dtype": "float32",
            "lora": {"r": 4, "alpha": 8, "dropout": 0.0},
            "logging_steps": 1,
        },
        "evaluation": {"holdout": 0.02},
        "preflight": {"cases": 0},
        "resources": {"gpus": 0},
    }
