"""What is in the way of a start is a sentence, and nothing is left running."""

import socket
import subprocess
import sys

import pytest

from dressage.local.errors import LaunchError
from dressage.local.service import LocalOptions, LocalService


def start(tmp_path, **options):
    said = []
    service = LocalService(LocalOptions(data_dir=tmp_path / "data", **options), said.append)
    with pytest.raises(LaunchError) as refused:
        service.start()
    assert said == []
    return str(refused.value)


def test_a_port_in_use(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert start(tmp_path, port=port) == (
            f"port {port} on 127.0.0.1 is in use; choose another one with --port"
        )


@pytest.mark.parametrize("port", [-1, 0, 65536, 99999])
def test_a_port_that_is_none(tmp_path, port):
    assert start(tmp_path, port=port) == f"--port {port}: give one from 1 to 65535"


@pytest.mark.parametrize("host", ["203.0.113.9", "no.such.host.invalid", "a..b"])
def test_a_host_that_is_not_this_one_is_no_port_in_use(tmp_path, host):
    said = start(tmp_path, host=host)
    assert said.startswith(f"--host {host}: this machine cannot listen there")


def test_a_data_directory_in_use(tmp_path):
    code = (
        "import fcntl, sys, time; from pathlib import Path; root = Path(sys.argv[1]); "
        "root.mkdir(); f = open(root / 'lock', 'w'); fcntl.flock(f, fcntl.LOCK_EX); "
        "print('locked', flush=True); time.sleep(60)"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "data")], stdout=subprocess.PIPE
    )
    try:
        assert other.stdout.readline() == b"locked\n"
        assert "is in use by another `dressage up`" in start(tmp_path)
    finally:
        other.kill()
        other.wait()


def test_a_data_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "data").write_text("a file")
    assert "cannot be made" in start(tmp_path)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8400"),
        ("0.0.0.0", "http://127.0.0.1:8400"),
        ("::", "http://[::1]:8400"),
        ("gpu-host", "http://gpu-host:8400"),
    ],
)
def test_the_address_for_this_machine(tmp_path, host, url):
    assert LocalOptions(data_dir=tmp_path, host=host).url == url
