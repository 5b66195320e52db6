import datetime
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np
import pytest

from dressage.sandbox.isolation import Isolation
from dressage.sandbox.pool import WorkerPool
from dressage.sandbox.process import Failure, Limits, Sandbox, SandboxStartError
from dressage.sandbox.worker import as_text
from tests.sandbox.calls import run

CODE = '''
import asyncio, os, subprocess, time
from dressage.authoring import function_tool, measure, pass_reason

@function_tool
def echo(text: str) -> str:
    """Echo."""
    print("x" * 1_000_000)
    return text

@function_tool
async def slow(seconds: float) -> dict:
    """Wait."""
    await asyncio.sleep(seconds)
    return {"slept": seconds}

@function_tool
def take_time() -> list:
    """Wait; begin and end."""
    begin = time.monotonic()
    time.sleep(2)
    return [begin, time.monotonic()]

@function_tool
def count() -> str:
    """How often this was called in the folder it finds itself in."""
    with open("calls", "a") as calls:
        calls.write("x")
    return os.environ["HOME"] + " " + open("calls").read()

@function_tool
def escape() -> str:
    """Leave a process of another session behind, whose parent has ended."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execvp("sleep", ["sleep", "987.5"])
        os._exit(0)
    os.wait()
    time.sleep(1000)

@function_tool
def hang() -> str:
    """Never return."""
    while True:
        pass

@function_tool
def spawn() -> str:
    """Start something, then never return."""
    subprocess.Popen(["sleep", "987.25"])
    time.sleep(1000)

@function_tool
def leave() -> str:
    """End the process."""
    os._exit(7)

@function_tool
def stop() -> str:
    """Raise SystemExit."""
    raise SystemExit(3)

@function_tool
def broken() -> str:
    """Raise."""
    raise ValueError("no \\ud800 luck")

@function_tool
def big() -> str:
    """Return 5 MB."""
    return "x" * 5_000_000

@function_tool
def memory() -> str:
    """Take 50 GB."""
    return str(len(bytearray(50 * 1024**3)))

@function_tool
def environment() -> dict:
    """Show the environment."""
    return dict(os.environ)

@measure
def fine(context):
    return pass_reason(context.final.text + context.tool_calls[0].result)
'''

FILL = """
from dressage.authoring import function_tool
import time

@function_tool
def fill() -> str:
    \"\"\"Write 20 files of 1 MB.\"\"\"
    for number in range(20):
        open(f"file-{number}", "wb").write(b"x" * 1_000_000)
    time.sleep(20)
    return "done"
"""


@pytest.fixture
def pool(tmp_path):
    (tmp_path / "tools.py").write_text(CODE)
    pool = WorkerPool(Sandbox(tmp_path), size=4)
    yield pool
    pool.close()


def call(name, **arguments):
    return None, {"call": "tool", "name": name, "arguments": arguments, "max_output": 100}


def test_results_come_back_in_order_and_prints_do_not_disturb_them(pool):
    outcomes = run(pool, [call("echo", text=str(n)) for n in range(40)], timeout=10)
    assert [outcome.value for outcome in outcomes] == [str(n) for n in range(40)]


def test_calls_run_side_by_side(pool):
    spans = [
        json.loads(outcome.value)
        for outcome in run(pool, [call("take_time") for _ in range(4)], timeout=20)
    ]
    assert max(begin for begin, _ in spans) < min(end for _, end in spans)


def test_each_worker_has_a_folder_of_its_own_which_goes_with_it(pool):
    first, second = pool.sandbox.start_worker(), pool.sandbox.start_worker()
    request = call("count")[1]
    home, calls = first.call(request, 10).value.split()
    other, others = second.call(request, 10).value.split()
    assert (calls, others, first.call(request, 10).value.split()[1]) == ("x", "x", "xx")
    assert home != other
    first.kill()
    wait_for(lambda: not Path(home).exists())
    assert second.call(request, 10).value.split() == [other, "xx"]
    second.kill()


def test_results_that_are_no_text_are_json(pool):
    assert run(pool, [call("slow", seconds=0)], timeout=10)[0].value == '{"slept": 0.0}'


@pytest.mark.parametrize(
    ("name", "failure", "message"),
    [
        ("hang", Failure.TIMED_OUT, "no result within 0.5 seconds"),
        ("leave", Failure.CRASHED, "the process ended during the call"),
        ("stop", Failure.RAISED, "SystemExit: 3"),
        ("broken", Failure.RAISED, "ValueError: no"),
        ("memory", Failure.RAISED, "MemoryError"),
    ],
)
def test_a_bad_tool_is_an_outcome_and_the_next_call_works(pool, name, failure, message):
    outcomes = run(pool, [call(name), call("echo", text="still here")], timeout=0.5)
    assert outcomes[0].failure is failure
    assert outcomes[0].message.startswith(message)
    assert run(pool, [call("echo", text="still here")], timeout=10)[0].value == "still here"


def test_a_long_result_is_cut_and_says_so(pool):
    (outcome,) = run(pool, [call("big")], timeout=10)
    assert outcome.value == "x" * 100 + "\n[truncated: 4999900 more characters]"


def test_no_secret_of_the_service_reaches_user_code(pool, monkeypatch, tmp_path):
    monkeypatch.setenv("DRESSAGE_DATABASE_URL", "postgresql://s3cr3t")
    fresh = WorkerPool(Sandbox(tmp_path), size=1)
    request = {**call("environment")[1], "max_output": 100_000}
    assert "s3cr3t" not in run(fresh, [(None, request)], timeout=10)[0].value
    fresh.close()


def test_what_a_tool_started_ends_with_it(pool):
    run(pool, [call("spawn")], timeout=0.5)
    listed = subprocess.run(["ps", "-ewwo", "args"], capture_output=True, text=True, check=True)
    assert "sleep 987.25" not in listed.stdout


def test_also_what_has_left_its_session_ends_with_it(pool):
    run(pool, [call("escape")], timeout=1)
    wait_for(lambda: "sleep 987.5" not in processes())


def test_code_that_leaves_strange_folders_beside_the_workers_hinders_nobody(tmp_path):
    (tmp_path / "tools.py").write_text(
        'import os\nfor name in ("x", "", "-1", "\u00b2", "9" * 40):\n'
        '    os.mkdir("worker-" + name)\n' + CODE
    )
    pool = WorkerPool(Sandbox(tmp_path), size=4)
    for _ in range(3):
        run(pool, [call("leave")], timeout=10)
        assert run(pool, [call("echo", text="fine")], timeout=10)[0].value == "fine"
    pool.close()


def test_workers_that_start_while_others_end_keep_their_folders(pool):
    """The guard clears up after those that ended while the loader forks the next ones."""
    for _ in range(15):
        ended = [pool.sandbox.start_worker() for _ in range(4)]
        for worker in ended:
            worker.kill()
        fresh = [pool.sandbox.start_worker() for _ in range(4)]
        outcomes = [worker.call(call("count")[1], 10) for worker in fresh]
        assert [outcome.failure for outcome in outcomes] == [None] * 4
        for worker in fresh:
            worker.kill()


def test_what_is_written_before_it_is_asked_is_neither_an_answer_nor_a_question(tmp_path):
    forged = '{"question": {"ask": "decode", "ids": [1]}, "id": "x"}'
    (tmp_path / "play.py").write_text(
        "import os\nfrom dressage.authoring import rollout_func\n\n@rollout_func\n"
        "def play(prompts, model):\n"
        "    for fd in range(3, 64):\n"
        f"        try: os.write(fd, {forged.encode() + bytes([10])!r})\n"
        "        except OSError: pass\n    return {}\n"
    )
    sandbox = Sandbox(tmp_path)
    worker, asked = sandbox.start_worker(), []
    request = {"call": "rollout_func", "name": "play", "prompts": []}
    outcome = worker.call(request, 10, asked.append)
    sandbox.close()
    assert (outcome.failure, asked) == (Failure.CRASHED, [])


def test_a_loader_that_died_is_started_again(pool):
    worker = pool.sandbox.start_worker()
    os.kill(parent(worker.pid), signal.SIGKILL)
    wait_for(lambda: not alive(worker.pid))
    worker.kill()
    assert run(pool, [call("echo", text="two")], timeout=30)[0].value == "two"


def test_files_are_limited_all_together(tmp_path):
    (tmp_path / "tools.py").write_text(FILL)
    pool = WorkerPool(Sandbox(tmp_path, Limits(disk_bytes=5_000_000)), size=1)
    (outcome,) = run(pool, [call("fill")], timeout=30)
    if pool.sandbox.walls.isolation is Isolation.BUBBLEWRAP:
        assert "No space left" in outcome.message
    else:
        assert outcome.message == "the suite's code has more than 5 MB of files"
    pool.close()


def test_the_context_crosses_the_pipe(pool):
    context = {
        "input": "q",
        "expect": {},
        "metadata": {},
        "messages": [],
        "final": "hel",
        "tool_calls": [{"name": "t", "arguments": {}, "result": "lo", "error": None}],
        "stop_reason": "completed",
    }
    request = {"call": "measure", "name": "fine", "context": context}
    (outcome,) = run(pool, [(None, request)], timeout=10)
    assert outcome.value == {"value": 1.0, "reason": "hello", "passed": True}


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import nothing_like_this", "tools.py line 1: ModuleNotFoundError"),
        ("\n\ndef f(:\n", "tools.py line 3: SyntaxError"),
        (
            "from dressage.authoring import function_tool\n\n@function_tool\ndef f(x):\n"
            '    """Doc."""\n',
            "tools.py line 3: tool 'f': parameter 'x' has no type annotation",
        ),
        ("raise SystemExit(1)", "tools.py line 1: SystemExit"),
        ("import os\nos._exit(1)", "the code ended its process"),
    ],
)
def test_code_that_does_not_load_is_explained_by_file_and_line(tmp_path, code, message):
    (tmp_path / "tools.py").write_text(code)
    with pytest.raises(SandboxStartError) as caught:
        Sandbox(tmp_path)
    assert str(caught.value).startswith(message)


@dataclass
class Point:
    x: int
    when: datetime.date


class Colour(Enum):
    RED = "red"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain é", "plain é"),
        (b"bytes \xc3\xa9", "bytes é"),
        (Point(1, datetime.date(2026, 1, 2)), '{"x": 1, "when": "2026-01-02"}'),
        (Colour.RED, '"red"'),
        ({3}, "[3]"),
        ((n * n for n in range(3)), "[0, 1, 4]"),
        (np.array([[1, 2]]), "[[1, 2]]"),
        (np.float64(0.5), "0.5"),
        ([float("nan"), float("inf")], '["NaN", "Infinity"]'),
        (None, "null"),
    ],
)
def test_a_result_is_json_whatever_it_was(value, text):
    assert as_text(value, 100) == text


@pytest.mark.parametrize("value", [object(), b"\xff", {"a": object()}])
def test_a_result_that_cannot_be_said_is_an_error(value):
    with pytest.raises(ValueError, match=r"no form for|can't decode"):
        as_text(value, 100)


def test_files_may_have_the_names_of_modules_that_are_loaded_already(tmp_path):
    for name in ("queue", "types", "json", "regex", "calendar"):
        (tmp_path / f"{name}.py").write_text(
            "import json\nfrom dressage.authoring import measure, pass_reason\n\n@measure\n"
            f"def of_{name}(context):\n    return pass_reason(json.dumps([1]))\n"
        )
    sandbox = Sandbox(tmp_path)
    worker = sandbox.start_worker()
    context = {"input": "q", "expect": {}, "final": "x", "tool_calls": []}
    request = {"call": "measure", "name": "of_json", "context": context}
    assert sandbox.measures == ["of_calendar", "of_json", "of_queue", "of_regex", "of_types"]
    assert worker.call(request, 10).value == {"value": 1.0, "reason": "[1]", "passed": True}
    worker.kill()
    sandbox.close()


def test_sandboxes_end_when_their_host_is_killed(tmp_path):
    (tmp_path / "tools.py").write_text(CODE)
    host = (
        "import sys, time\nfrom pathlib import Path\n"
        "from dressage.sandbox.process import Sandbox\n"
        f"sandbox = Sandbox(Path({str(tmp_path)!r}))\nworker = sandbox.start_worker()\n"
        "print(sandbox._process.pid, worker.pid, flush=True)\n"
        "worker.call({'call': 'tool', 'name': 'hang', 'arguments': {}, 'max_output': 9}, 1000)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", host], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert all(alive(pid) for pid in pids)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "the sandbox is still there"
        time.sleep(0.05)


def wait_for(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def processes():
    return subprocess.run(["ps", "-ewwo", "args"], capture_output=True, text=True).stdout


def parent(pid):
    (line,) = re.findall(r"PPid:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(line)


def alive(pid):
    try:
        return "Z (zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_limits_are_those_given(tmp_path):
    (tmp_path / "tools.py").write_text(
        "from dressage.authoring import function_tool\n\n@function_tool\ndef fill() -> str:\n"
        '    """Write 2 MB."""\n    open("file", "wb").write(b"x" * 2_000_000)\n    return "done"\n'
    )
    pool = WorkerPool(Sandbox(tmp_path, Limits(file_bytes=1_000_000)), size=1)
    (outcome,) = run(pool, [call("fill")], timeout=10)
    pool.close()
    assert outcome.failure is Failure.RAISED
    assert "File too large" in outcome.message


def test_tools_of_the_agents_sdk_are_tools(tmp_path):
    (tmp_path / "tools.py").write_text(
        "from agents import function_tool\n\n@function_tool\n"
        "async def add(a: int, b: int = 2) -> int:\n"
        '    """Add.\n\n    Args:\n        a: The first.\n    """\n    return a + b\n'
    )
    pool = WorkerPool(Sandbox(tmp_path), size=1)
    (schema,) = pool.sandbox.tools
    calls = [
        (None, {**call("add")[1], "arguments": arguments})
        for arguments in ({"a": 1, "b": 2}, {"a": "one", "b": 2})
    ]
    good, bad = run(pool, calls, timeout=30)
    pool.close()
    assert schema["name"] == "add"
    assert schema["description"] == "Add."
    assert schema["parameters"]["properties"]["a"] == {
        "type": "integer",
        "description": "The first.",
    }
    assert good.value == "3"
    assert bad.failure is Failure.ARGUMENTS
    assert "'one' is not of type 'integer'" in bad.message
