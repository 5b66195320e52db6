"""The whole service, as `dressage up` starts it."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dressage.client import Client
from tests.s3_server import S3Server
from tests.waiting import wait_for

DRESSAGE = (sys.executable, "-m", "dressage.cli.main")


class Service:
    """A running `dressage up` with short leases, and its files in a bucket."""

    def __init__(self, root, s3):
        self.root = root
        s3.make_bucket("files")
        self.storage = {**s3.environment, "DRESSAGE_STORAGE": "s3://files/of-the-service"}
        self.data = root / "data"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.config = {"XDG_CONFIG_HOME": str(root / "config")}
        self.start()

    def start(self):
        self.log = (self.root / "up.log").open("w")
        self.process = subprocess.Popen(
            [*DRESSAGE, "up", "--data-dir", str(self.data), "--port", str(self.port)],
            stdout=self.log,
            stderr=self.log,
            env={**os.environ, "DRESSAGE_LEASE_SECONDS": "4", **self.config, **self.storage},
        )
        wait_for(lambda: "ready:" in self.output() or self.process.poll() is not None, 60)
        assert self.process.poll() is None, self.output()

    @property
    def key(self):
        """The operator key that the start has kept for its user."""
        file = self.root / "config" / "dressage" / "config.json"
        return json.loads(file.read_text())["keys"][self.url]

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)

    def output(self):
        return (self.root / "up.log").read_text()

    def pid(self, marker):
        """The child of the supervisor whose command line has the marker."""
        listed = subprocess.run(
            ["ps", "--ppid", str(self.process.pid), "-ww", "-o", "pid=,args="],
            capture_output=True,
            text=True,
            check=True,
        )
        pids = [int(row.split()[0]) for row in listed.stdout.splitlines() if marker in row]
        return pids[0] if pids else None

    def dressage(self, *arguments):
        """Run a command of ours against this service."""
        return subprocess.run(
            [*DRESSAGE, *arguments],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "DRESSAGE_URL": self.url, "COLUMNS": "200", **self.config},
        )


@pytest.fixture(scope="module")
def service():
    root = Path(tempfile.mkdtemp(prefix="dressage-e2e-"))
    root.chmod(0o711)
    with S3Server() as s3:
        service = Service(root, s3)
        yield service
        service.stop()
    shutil.rmtree(root)


@pytest.fixture
def client(service):
    with Client(service.url, key=service.key) as client:
        yield client


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
