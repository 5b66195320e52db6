"""The `dressage` command against a live service, and a worker with scripted children."""

import pytest
import structlog
from typer.testing import CliRunner

from dressage.cli.console import console, errors
from dressage.cli.main import app
from tests.scripted import context, service, submit, worker
from tests.servers import KEYS

__all__ = ["context", "service", "submit", "worker"]


@pytest.fixture
def dressage(monkeypatch, tmp_path):
    """Run a command line; its exit code, stdout and stderr. No key, and no service by default."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("DRESSAGE_URL", "http://127.0.0.1:9")
    for terminal in (console, errors):
        monkeypatch.setattr(terminal, "_width", 250)

    def go(*arguments, code=0):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        unexpected = result.exception and not isinstance(result.exception, SystemExit)
        assert not unexpected, repr(result.exception)
        assert result.exit_code == code, result.output
        return result

    monkeypatch.setattr("app.main.configure_logs", lambda: None)
    with structlog.testing.capture_logs():  # of a worker in this process: not what commands say
        yield go


@pytest.fixture
def operator(dressage, service, monkeypatch):
    """The same, as an operator of a live service."""
    monkeypatch.setenv("DRESSAGE_URL", service)
    monkeypatch.setenv("DRESSAGE_API_KEY", KEYS["operator"])
    return dressage
