import os
import subprocess
import time

import pytest

from dressage.sandbox.pool import SandboxPool
from dressage.sandbox.process import Failure, Limits, SandboxStartError

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


@pytest.fixture
def pool(tmp_path):
    (tmp_path / "tools.py").write_text(CODE)
    pool = SandboxPool(tmp_path, size=4)
    yield pool
    pool.close()


def call(name, **arguments):
    return {"call": "tool", "name": name, "arguments": arguments, "max_output": 100}


def test_results_come_back_in_order_and_prints_do_not_disturb_them(pool):
    outcomes = pool.run([call("echo", text=str(n)) for n in range(40)], timeout=10)
    assert [outcome.value for outcome in outcomes] == [str(n) for n in range(40)]


def test_calls_run_side_by_side(pool):
    pool.run([call("slow", seconds=0.1)] * 4, timeout=10)  # all four processes are up
    started = time.monotonic()
    outcomes = pool.run([call("slow", seconds=0.5)] * 4, timeout=10)
    assert time.monotonic() - started < 1.5  # 2.0 one after the other
    assert outcomes[0].value == '{"slept": 0.5}'


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
    outcomes = pool.run([call(name), call("echo", text="still here")], timeout=0.5)
    assert outcomes[0].failure is failure
    assert outcomes[0].message.startswith(message)
    assert pool.run([call("echo", text="still here")], timeout=10)[0].value == "still here"


def test_a_long_result_is_cut_and_says_so(pool):
    (outcome,) = pool.run([call("big")], timeout=10)
    assert outcome.value == "x" * 100 + "\n[truncated: 4999900 more characters]"


def test_no_secret_of_the_service_reaches_user_code(pool, monkeypatch, tmp_path):
    monkeypatch.setenv("DRESSAGE_DATABASE_URL", "postgresql://s3cr3t")
    fresh = SandboxPool(tmp_path, size=1)
    request = {**call("environment"), "max_output": 100_000}
    assert "s3cr3t" not in fresh.run([request], timeout=10)[0].value
    fresh.close()


def test_what_a_tool_started_ends_with_it(pool):
    pool.run([call("spawn")], timeout=0.5)
    listed = subprocess.run(["ps", "-ewwo", "args"], capture_output=True, text=True, check=True)
    assert "sleep 987.25" not in listed.stdout


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
    (outcome,) = pool.run([{"call": "measure", "name": "fine", "context": context}], timeout=10)
    assert outcome.value == {"value": 1.0, "reason": "hello"}


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
        SandboxPool(tmp_path, size=1)
    assert str(caught.value).startswith(message)


def test_sandboxes_end_when_their_host_is_killed(tmp_path):
    (tmp_path / "tools.py").write_text(CODE)
    host = (
        "import sys, time\nfrom pathlib import Path\n"
        "from dressage.sandbox.process import Limits, SandboxProcess\n"
        f"p = SandboxProcess(Path({str(tmp_path)!r}), Limits())\n"
        "print(p._process.pid, flush=True)\ntime.sleep(1000)\n"
    )
    import sys

    process = subprocess.Popen([sys.executable, "-c", host], stdout=subprocess.PIPE, text=True)
    sandbox = int(process.stdout.readline())
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(sandbox, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("the sandbox is still there")


def test_limits_are_those_given(tmp_path):
    (tmp_path / "tools.py").write_text(
        "from dressage.authoring import function_tool\n\n@function_tool\ndef fill() -> str:\n"
        '    """Write 2 MB."""\n    open("file", "wb").write(b"x" * 2_000_000)\n    return "done"\n'
    )
    pool = SandboxPool(tmp_path, size=1, limits=Limits(file_bytes=1_000_000))
    (outcome,) = pool.run([call("fill")], timeout=10)
    pool.close()
    assert outcome.failure is Failure.RAISED
    assert "File too large" in outcome.message
