"""A supervised process: up, kept up, told why not."""

import os
import signal
import sys
import time

import pytest

from dressage.local import process
from dressage.local.errors import LaunchError
from dressage.local.process import Program, SupervisedProcess
from tests.waiting import wait_for


def python(code, **options):
    return Program("child", (sys.executable, "-c", code), **options)


@pytest.fixture
def supervised(tmp_path):
    started = []

    def go(program):
        started.append(SupervisedProcess(program, tmp_path))
        return started[-1]

    yield go
    for one in started:
        one.stop()


def test_one_that_does_not_come_up_is_told_with_its_last_words(supervised):
    child = supervised(python("print('no room'); exit(3)", ready=lambda: False))
    with pytest.raises(LaunchError, match="child did not come up:\nno room"):
        child.bring_up()


def test_one_that_ends_is_started_again_later_each_time(supervised, monkeypatch):
    monkeypatch.setattr(process, "FIRST_DELAY", 0.05)
    child = supervised(python("import time; time.sleep(60)"))
    child.bring_up()
    pids, lines = [child.pid], []
    for _ in range(2):
        os.kill(child.pid, signal.SIGKILL)
        wait_for(lambda: child.pid is None)
        lines.append(child.keep())
        wait_for(lambda: child.keep() or child.pid)
        pids.append(child.pid)
    assert len(set(pids)) == 3
    assert lines == [
        "child ended (-9); restarting in 0.05 s",
        "child ended (-9); restarting in 0.1 s",
    ]


def test_one_that_ignores_the_signal_is_killed(supervised, tmp_path):
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        f"open({str(tmp_path / 'up')!r}, 'w'); time.sleep(60)"
    )
    child = supervised(python(code, stop_timeout=0.3, ready=(tmp_path / "up").exists))
    child.bring_up()
    pid, began = child.pid, time.monotonic()
    child.stop()
    assert time.monotonic() - began < 30
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_log_that_grows_long_begins_anew(tmp_path, monkeypatch):
    monkeypatch.setattr("dressage.local.process.LONGEST_LOG", 1000)
    command = (sys.executable, "-uc", "import time\nwhile True: print('x' * 100); time.sleep(0.01)")
    process = SupervisedProcess(Program("talks", command), tmp_path)
    process.start()
    log = tmp_path / "talks.log"
    wait_for(lambda: log.stat().st_size > 1000)
    process.keep()
    assert log.stat().st_size < 1000
    assert (tmp_path / "talks.log.1").stat().st_size > 1000
    wait_for(lambda: log.stat().st_size > 0)
    process.stop()
