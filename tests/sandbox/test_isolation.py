"""User code that tries to get out, behind each kind of wall that this host has."""

import os
import socket

import pytest

from dressage.sandbox import isolation
from dressage.sandbox.isolation import Isolation, strongest
from dressage.sandbox.pool import WorkerPool
from dressage.sandbox.process import Limits, Sandbox
from tests.sandbox.calls import run

CODE = """
import measures
from dressage.authoring import function_tool

@function_tool
def attempt(code: str) -> str:
    \"""Run Python.\"""
    scope = {"measures": measures}
    exec(code, scope)
    return str(scope.get("result"))
"""
MEASURES = """
from dressage.authoring import fail_reason, measure

@measure
def strict(context):
    return fail_reason("never good enough")
"""
CONTEXT = {
    "input": "q",
    "expect": {},
    "metadata": {},
    "messages": [],
    "final": "",
    "tool_calls": [],
    "stop_reason": "completed",
}


@pytest.fixture(params=Isolation)
def walls(request):
    found = strongest(atmost=request.param)
    if found.isolation is not request.param:
        pytest.skip(f"this host has no {request.param}")
    if found.as_root:
        pytest.skip(f"here {request.param} would run user code as root, and does not")
    return found


@pytest.fixture
def strong_walls(walls):
    if walls.isolation is Isolation.LIMITS:
        pytest.skip("limits alone do not hide anything")
    return walls


@pytest.fixture
def attempt(tmp_path):
    """`attempt(walls, code)`: what the sandboxed code made of it."""
    pools = []

    def go(walls, code, limits=None):
        folder = tmp_path / "suite"
        if not pools:
            folder.mkdir()
            (folder / "tools.py").write_text(CODE)
            (folder / "measures.py").write_text(MEASURES)
            pools.append(WorkerPool(Sandbox(folder, limits, walls), size=1))
        arguments = {"code": code}
        request = {"call": "tool", "name": "attempt", "arguments": arguments, "max_output": 2000}
        (outcome,) = run(pools[0], [(None, request)], timeout=60)
        return outcome

    go.pools = pools
    yield go
    for pool in pools:
        pool.close()


def refused(outcome):
    return outcome.failure is not None and any(
        word in outcome.message
        for word in (
            "No such file",
            "Permission denied",
            "Read-only",
            "not permitted",
            "unreachable",
        )
    )


def test_ordinary_work_is_possible(attempt, walls):
    code = (
        "import json, tempfile, subprocess, ssl, sqlite3, urllib.request, asyncio, threading\n"
        "open('note', 'w').write('x')\n"
        "with tempfile.NamedTemporaryFile() as f: f.write(b'x')\n"
        "result = open('note').read() + subprocess.run(['echo', 'hi'], capture_output=True,"
        " text=True).stdout"
    )
    assert attempt(walls, code).value == "xhi\n"


def test_another_jobs_directory_cannot_be_read(attempt, strong_walls, tmp_path):
    other = tmp_path / "other-job"
    other.mkdir(mode=0o777)
    (other / "secret").write_text("s3cr3t")
    assert refused(attempt(strong_walls, f"result = open({str(other / 'secret')!r}).read()"))


def test_the_environment_of_the_trainer_cannot_be_read(attempt, strong_walls, monkeypatch):
    code = f"result = open('/proc/{os.getpid()}/environ', 'rb').read()"
    assert refused(attempt(strong_walls, code))


def test_the_trainer_cannot_be_killed(attempt, strong_walls):
    outcome = attempt(strong_walls, f"import os; os.kill({os.getpid()}, 0)")
    assert outcome.failure is not None


HARMFUL = {
    "a socket of each family": "import socket\nfor family in (1, 2, 10, 16, 17, 38, 40):\n"
    "    for kind in (1, 2, 3):\n"
    "        try: socket.socket(family, kind)\n"
    "        except OSError: continue\n"
    "        open(f'/got-{family}-{kind}', 'w')\n"
    "raise PermissionError('Permission denied')",
    "a datagram to any unix socket": "import socket; socket.socketpair(1, 2)",
    "the clock": "import time; time.clock_settime(0, 0)",
    "a namespace": "import ctypes, os; c = ctypes.CDLL(None, use_errno=True)\n"
    "if c.unshare(0x10000000): raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))",
    "a mount": "import ctypes, os; c = ctypes.CDLL(None, use_errno=True)\n"
    "if c.mount(b'x', b'/', b'tmpfs', 0, None):\n"
    "    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))",
    "another process' memory": "import ctypes, os; c = ctypes.CDLL(None, use_errno=True)\n"
    "if c.ptrace(16, os.getppid(), 0, 0):\n"
    "    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))",
    "the loader's life": "import os; os.kill(os.getppid(), 9)",
    "everybody's life": "import os; os.kill(-1, 9)",
    "the loader's limits": "import resource, os\n"
    "resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (1, 1))",
    "root again": "import os; os.setuid(0); open('/etc/shadow').read()",
    "a file of root": "open('/etc/shadow').read()",
    "a device": "import os; os.mknod('sda', 0o60600, os.makedev(8, 0)); open('sda')",
    "shared memory": "open('/dev/shm/got', 'w')",
    "the temporary folder of all": "open('/tmp/got', 'w')",
}


@pytest.mark.parametrize("what", HARMFUL)
def test_user_code_does_not_get(attempt, strong_walls, what):
    if what == "shared memory" and strong_walls.isolation is Isolation.BUBBLEWRAP:
        pytest.skip("it has one of its own, in its own namespace")
    outcome = attempt(strong_walls, HARMFUL[what])
    assert refused(outcome), outcome
    assert attempt(strong_walls, "result = 'still here'").value == "still here"


def test_modes_and_times_of_files_of_others_stay(attempt, strong_walls, tmp_path):
    file = tmp_path / "open"
    file.write_text("x")
    file.chmod(0o666)
    before = file.stat()
    for call in (f"chmod({str(file)!r}, 0o600)", f"utime({str(file)!r}, (0, 0))"):
        attempt(strong_walls, f"import os; os.{call}")
    assert (file.stat().st_mode, file.stat().st_mtime) == (before.st_mode, before.st_mtime)


def test_code_is_never_root(attempt, walls):
    assert attempt(walls, "import os; result = os.getuid()").value != "0"


def test_a_worker_cannot_read_the_folder_of_another(attempt, strong_walls):
    mine = attempt(strong_walls, "import os; open('s', 'w').write('x'); result = os.getcwd()").value
    other = attempt.pools[0].sandbox.start_worker()
    code = f"result = open({mine + '/s'!r}).read()"
    arguments = {"name": "attempt", "arguments": {"code": code}, "max_output": 200}
    outcome = other.call({"call": "tool", **arguments}, 30)
    other.kill()
    if strong_walls.isolation is Isolation.LANDLOCK:
        assert refused(outcome), outcome


def test_a_host_weaker_than_the_operator_accepts_is_refused(monkeypatch):
    monkeypatch.setattr(isolation.landlock, "version", lambda: 0)
    monkeypatch.setattr(isolation, "_bubblewrap_works", lambda: False)
    monkeypatch.setattr(isolation, "_python_is_reachable", lambda _: True)
    assert "DRESSAGE_MINIMUM_ISOLATION is landlock" in isolation.too_weak(Isolation.LANDLOCK)
    assert isolation.too_weak(Isolation.LIMITS) is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_root_runs_no_code_as_root(monkeypatch):
    monkeypatch.setattr(isolation, "_bubblewrap_works", lambda: False)
    monkeypatch.setattr(isolation, "_python_is_reachable", lambda _: False)
    monkeypatch.setattr(isolation, "_can_keep_reading", lambda _: False)
    assert "would run as root" in isolation.too_weak(Isolation.LIMITS)


def test_the_suite_cannot_be_written_over(attempt, strong_walls, tmp_path):
    attempt(strong_walls, "result = 1")
    target = tmp_path / "suite" / "measures.py"
    assert refused(attempt(strong_walls, f"open({str(target)!r}, 'w').write('')"))
    assert target.read_text() == MEASURES


def test_there_is_no_network(attempt, strong_walls):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket; socket.create_connection(('127.0.0.1', {port}), timeout=5)"
        outcome = attempt(strong_walls, code)
    assert outcome.failure is not None


@pytest.mark.parametrize("isolation", [Isolation.BUBBLEWRAP, Isolation.LANDLOCK])
def test_the_network_can_be_allowed(attempt, isolation):
    walls = strongest(network=True, atmost=isolation)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket; socket.create_connection(('127.0.0.1', {port}), timeout=5)"
        assert attempt(walls, code).failure is None


def test_a_fork_bomb_ends(attempt, walls):
    code = """
import os, time
children = 0
try:
    while children < 5000:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        children += 1
    result = "no end"
except BlockingIOError:
    result = "stopped"
"""
    assert attempt(walls, code, Limits(processes=40)).value == "stopped"


def test_the_disk_cannot_be_filled(attempt, walls):
    one = "open('a', 'wb').write(bytes(20_000_000))"
    outcome = attempt(walls, one, Limits(file_bytes=10_000_000, disk_bytes=30_000_000))
    assert "File too large" in outcome.message
    if walls.isolation is not Isolation.BUBBLEWRAP:
        return
    many = "for i in range(10): open(f'{place}/f{i}', 'wb').write(bytes(9_000_000))"
    for place in (".", "/dev/shm"):
        assert "No space left" in attempt(walls, f"place = {place!r}\n{many}").message
    for place in ("/", "/dev", "/tmp", "/usr", "/proc"):
        outcome = attempt(walls, f"open({place!r} + '/file', 'w')")
        assert refused(outcome), (place, outcome)


def test_memory_is_limited(attempt, walls):
    assert "MemoryError" in attempt(walls, "bytearray(50 * 1024**3)").message


def test_a_tool_cannot_patch_a_measure(attempt, walls):
    code = (
        "from dressage.authoring import pass_reason\n"
        "measures.strict.function = lambda context: pass_reason('hacked')\n"
        "object.__setattr__(measures.strict, '_function', measures.strict.function)\n"
        "type(measures.strict).evaluate = None"
    )
    attempt(walls, code)
    request = {"call": "measure", "name": "strict", "context": CONTEXT}
    (outcome,) = run(attempt.pools[0], [(None, request)], timeout=10)
    assert outcome.value == {"value": 0.0, "reason": "never good enough", "passed": False}


def test_the_walls_say_what_they_are(walls):
    assert str(walls).startswith(walls.isolation)
    assert "with network" not in str(walls)
    assert "with network" in str(strongest(network=True, atmost=walls.isolation))
