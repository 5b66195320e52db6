"""Suites' code as people write it: what works, and what is refused with a way out."""

import asyncio
import json
import subprocess
import textwrap
import time

import pytest

from dressage.authoring.measure import MeasureContext
from dressage.measuring.runner import MeasureRunner
from dressage.sandbox.pool import WorkerPool
from dressage.sandbox.process import Failure, Limits, Sandbox, SandboxStartError
from dressage.spec.measure import RewardSpec
from tests.sandbox.calls import run

CONTEXT = {"input": "q", "expect": {}, "final": "x", "tool_calls": []}


@pytest.fixture
def suite(tmp_path):
    """`suite("code", **more files)`: a pool with this code."""
    pools = []

    def make(code, **files):
        for name, text in {"suite": code, **files}.items():
            path = tmp_path / f"{name.replace('__', '/', 1)}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(textwrap.dedent(text))
        pools.append(WorkerPool(Sandbox(tmp_path), size=2))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def call(pool, name, seed=None, **arguments):
    request = {"call": "tool", "name": name, "arguments": arguments, "max_output": 1000}
    (outcome,) = run(pool, [(None, {**request, "seed": seed})], timeout=20)
    return outcome


DRAWS = '''
    import random
    import numpy as np
    from dressage.authoring import Environment, function_tool, measure, score

    class World(Environment):
        def reset(self, case):
            return f"{random.random()} {np.random.rand()} {hash('abc')}"

        def draw(self) -> str:
            """Draw."""
            return f"{random.random()} {np.random.rand()}"

    @function_tool
    def draw() -> str:
        """Draw."""
        return f"{random.random()} {np.random.rand()} {hash('abc')} {list({'a', 'b', 'c'})}"

    @measure
    def chance(context):
        return score(random.random(), str(hash("abc")))
'''


def test_draws_are_equal_for_equal_seeds_in_any_process_and_sandbox(suite, tmp_path):
    first = suite(DRAWS)
    opened = []
    for seed in (1, 1, 2):
        worker = first.sandbox.start_worker()
        case = {"input": "q", "seed": seed}
        request = {"call": "open", "name": "World", "case": case, "seed": seed, "max_output": 100}
        text = worker.call(request, 10).value
        draw = {"call": "tool", "name": "draw", "arguments": {}, "max_output": 100}
        opened.append((text, worker.call(draw, 10).value, worker.call(draw, 10).value))
        worker.kill()
    assert opened[0] == opened[1] != opened[2]
    assert opened[0][1] != opened[0][2]  # the draws of one rollout go on
    assert opened[0][0].split()[2] == opened[2][0].split()[2]  # hashes are the same everywhere
    again = Sandbox(tmp_path)
    other = WorkerPool(again, size=1)
    assert call(first, "draw", seed=7).value == call(other, "draw", seed=7).value
    assert call(first, "draw", seed=7).value != call(first, "draw", seed=8).value
    other.close()


def test_measures_draw_by_the_case_and_the_jobs_seed(suite):
    pool = suite(DRAWS)

    def values(seed):
        runner = MeasureRunner([RewardSpec(measure="chance")], pool, timeout=10, seed=seed)
        contexts = [MeasureContext(input=text, expect={}) for text in ("a", "a", "b")]
        return [found.value["value"] for (found,) in runner.run(contexts, [None] * 3)]

    a, again, b = values(0)
    assert a == again != b
    assert values(0) == [a, a, b] != values(1)


def test_plain_functions_may_run_loops_of_their_own_and_async_ones_are_awaited(suite):
    pool = suite('''
        import asyncio
        from dressage.authoring import function_tool, measure, pass_reason, reward_function

        async def slow(value):
            await asyncio.sleep(0.01)
            return value

        @function_tool
        def plain() -> str:
            """Plain."""
            return asyncio.run(slow("plain"))

        @function_tool
        async def later() -> str:
            """Later."""
            return await slow("later")

        @function_tool
        async def piece_by_piece() -> list[int]:
            """An async generator."""
            for number in range(3):
                yield number

        @measure
        def judged(context):
            return pass_reason(asyncio.run(slow("judged")))

        @reward_function
        def rewarded(completions, **columns):
            return asyncio.run(slow([0.5] * len(completions)))
    ''')
    assert call(pool, "plain").value == "plain"
    assert call(pool, "later").value == "later"
    assert call(pool, "piece_by_piece").value == "[0, 1, 2]"
    rewards = [RewardSpec(measure="judged"), RewardSpec(function="rewarded")]
    ((verdict, reward),) = MeasureRunner(rewards, pool, timeout=10).run(
        [MeasureContext(input="q", expect={})], [None]
    )
    assert (verdict.value["reason"], reward.value["value"]) == ("judged", 0.5)


def test_what_shared_memory_would_be_for_is_refused_with_the_way_out(suite):
    pool = suite('''
        import multiprocessing
        from dressage.authoring import function_tool

        @function_tool
        def queue() -> str:
            """Make one."""
            return str(multiprocessing.Queue())
    ''')
    outcome = call(pool, "queue")
    if outcome.failure:  # bubblewrap gives each sandbox a /dev/shm of its own
        assert "threads and subprocesses work" in outcome.message
    else:
        assert "Queue" in outcome.value


def test_what_code_prints_is_shown_up_to_a_limit(suite, caplog):
    pool = suite('''
        from dressage.authoring import function_tool

        @function_tool
        def talk(times: int) -> str:
            """Talk."""
            for _ in range(times):
                print("counting", times)
            return "done"
    ''')
    with caplog.at_level("INFO"):
        assert call(pool, "talk", times=1).printed == "counting 1"
        assert len(call(pool, "talk", times=1_000_000).printed) <= 2000
        for _ in range(60):
            call(pool, "talk", times=2)
    shown = [record.getMessage() for record in caplog.records if "talk printed" in record.message]
    assert len(shown) == 50
    assert "nothing more of it is shown" in caplog.text


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (
            "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()",
            "suite.py: its import starts threads",
        ),
        ("import asyncio\nLOOP = asyncio.new_event_loop()", "'LOOP' is an event loop"),
        ("import no_such_package", "No module named 'no_such_package'; a suite has what"),
        (
            "from __future__ import annotations\nfrom dressage.authoring import function_tool\n"
            "@function_tool\ndef f(x: Nowhere) -> str:\n    '''F.'''\n    return ''",
            "unknown annotation: name 'Nowhere' is not defined; import it also",
        ),
        (
            "from dressage.authoring import Environment\nclass W(Environment):\n"
            "    def get_reward(self) -> float:\n        '''R.'''\n        return 1.0",
            "'W': get_reward would be shown to the model as a tool",
        ),
    ],
)
def test_what_cannot_work_is_refused_by_name(suite, code, sentence):
    with pytest.raises(SandboxStartError) as caught:
        suite(code)
    assert sentence in str(caught.value)


def test_an_import_that_does_not_end_says_where_it_was(suite):
    code = """
        import signal, time
        signal.setitimer(signal.ITIMER_REAL, 0.5)  # instead of the 45 seconds it has
        time.sleep(100)
    """
    with pytest.raises(SandboxStartError, match=r"suite.py line 4: TimeoutError: its import takes"):
        suite(code)


def test_locks_and_pools_made_at_import_work(suite):
    pool = suite('''
        import threading
        from concurrent.futures import ThreadPoolExecutor
        from dressage.authoring import function_tool

        LOCK, POOL = threading.Lock(), ThreadPoolExecutor(2)

        @function_tool
        def square(n: int) -> int:
            """Square."""
            with LOCK:
                return POOL.submit(pow, n, 2).result(5)
    ''')
    assert call(pool, "square", n=3).value == "9"


def test_annotations_may_name_what_comes_below(suite):
    pool = suite('''
        from __future__ import annotations
        from pydantic import BaseModel
        from dressage.authoring import function_tool

        @function_tool
        def place(where: Point) -> str:
            """Put."""
            return f"{where.x}"

        class Point(BaseModel):
            x: int
    ''')
    assert call(pool, "place", where={"x": 4}).value == "4"


def test_measures_inside_of_packages_are_found(suite):
    pool = suite(
        "",
        **{
            "grading____init__": "",
            "grading__rules": """
                from dressage.authoring import measure, pass_reason

                @measure
                def inner(context):
                    return pass_reason("ok")
            """,
        },
    )
    assert pool.sandbox.measures == ["inner"]


def test_a_tool_of_the_agents_sdk_that_raises_has_failed_and_keeps_its_text(suite):
    pool = suite('''
        from agents import function_tool

        @function_tool
        def divide(a: int, b: int) -> float:
            """Divide."""
            return a / b

        def told(context, error):
            return f"told: {error}"

        @function_tool(failure_error_function=told)
        def careful(a: int, b: int) -> float:
            """Divide."""
            return a / b
    ''')
    assert call(pool, "divide", a=4, b=2).value == "2.0"
    failed = call(pool, "divide", a=1, b=0)
    assert failed.failure is Failure.RAISED
    assert "An error occurred while running the tool" in failed.message
    assert call(pool, "careful", a=1, b=0).message == "told: division by zero"


TRL_WORLD = '''
    from dressage.authoring import reward_function

    class Maze:
        def reset(self, **row):
            self.seen, self.steps = row, 0
            return None

        def walk(self, by: int) -> int:
            """Walk.

            Args:
                by: Steps.
            """
            self.steps += by
            return self.steps

    @reward_function
    def walked(completions, environments, trainer_state, completion_ids, log_metric, **columns):
        log_metric("longest", max(e.steps for e in environments))
        assert [len(ids) for ids in completion_ids] == [2, 3]
        return [e.steps + trainer_state.global_step + goal for e, goal in
                zip(environments, columns["goal"])]

    @reward_function
    def sometimes(completions, **columns):
        return (None if text[-1]["content"] == "no" else 2 for text in completions)
'''


def test_environments_and_reward_functions_as_trl_has_them(suite):
    pool = suite(TRL_WORLD)
    (kind,) = pool.sandbox.environments
    assert (kind["name"], [tool["name"] for tool in kind["tools"]]) == ("Maze", ["walk"])
    workers, contexts = [], []
    for steps, said in ((3, "yes"), (5, "no")):
        worker = pool.sandbox.start_worker()
        case = {"input": "go", "expect": {"goal": 10}, "metadata": {"map": "m"}, "seed": 0}
        worker.call({"call": "open", "name": "Maze", "case": case, "max_output": 100}, 10)
        walk = {"call": "tool", "name": "walk", "arguments": {"by": steps}, "max_output": 100}
        assert worker.call(walk, 10).value == str(steps)
        workers.append(worker)
        turns = [{"role": "user", "content": "go"}, {"role": "assistant", "content": said}]
        contexts.append(
            MeasureContext(input="go", expect={"goal": 10}, messages=turns, prompt_length=1)
        )
    rewards = [RewardSpec(function="walked"), RewardSpec(function="sometimes")]
    runner = MeasureRunner(rewards, pool, timeout=10)
    found = asyncio.run(
        runner.completed(
            [[None, None], [None, None]],
            contexts,
            workers,
            completion_ids=[[1, 2], [1, 2, 3]],
            state={"global_step": 100},
        )
    )
    for worker in workers:
        worker.kill()
    values = [[outcome.value["value"] for outcome in outcomes] for outcomes in found]
    assert values == [[113.0, 2.0], [115.0, None]]
    assert runner.logged == {"longest": [5.0]}


def test_the_prompt_of_a_rollout_with_user_turns_is_the_prompt(suite):
    pool = suite("""
        import json
        from dressage.authoring import reward_function

        @reward_function
        def seen(prompts, completions, **columns):
            raise ValueError(json.dumps([len(prompts[0]), len(completions[0])]))
    """)
    turns = [{"role": role, "content": "x"} for role in ("system", "user", "assistant", "user")]
    turns.append({"role": "assistant", "content": "y"})
    context = MeasureContext(input="x", expect={}, messages=turns, prompt_length=2)
    ((outcome,),) = MeasureRunner([RewardSpec(function="seen")], pool, timeout=10).run(
        [context], [None]
    )
    assert json.loads(outcome.message.removeprefix("ValueError: ")) == [2, 3]


@pytest.mark.parametrize(
    ("result", "failure", "values"),
    [
        ("[1e39]", Failure.OUT_OF_RANGE, None),
        ("[float('nan')]", Failure.OUT_OF_RANGE, None),
        ("[1e9]", None, [1e9]),
        ("map(float, ['2'])", None, [2.0]),
        ("__import__('numpy').array([3])", None, [3.0]),
        ("itertools.count()", Failure.WRONG_TYPE, None),
        ("'7'", Failure.WRONG_TYPE, None),
        ("[]", Failure.WRONG_TYPE, None),
    ],
)
def test_what_a_reward_function_may_return(suite, result, failure, values):
    pool = suite(f"""
        import itertools
        from dressage.authoring import reward_function

        @reward_function
        def given(completions, **columns):
            return {result}
    """)
    ((outcome,),) = MeasureRunner([RewardSpec(function="given")], pool, timeout=10).run(
        [MeasureContext(input="q", expect={})], [None]
    )
    assert outcome.failure is failure
    assert values is None or [outcome.value["value"]] == values


def test_a_reward_function_has_time_for_every_completion(suite):
    pool = suite("""
        import time
        from dressage.authoring import reward_function

        @reward_function
        def slow(completions, **columns):
            time.sleep(0.1 * len(completions))
            return [1.0] * len(completions)
    """)
    contexts = [MeasureContext(input="q", expect={})] * 10
    found = MeasureRunner([RewardSpec(function="slow")], pool, timeout=0.5).run(
        contexts, [None] * 10
    )
    assert [outcome.failure for (outcome,) in found] == [None] * 10


def test_one_rollout_that_fills_its_folder_ends_alone(tmp_path):
    code = """
        import time
        from dressage.authoring import function_tool

        @function_tool
        def write(megabytes: int, seconds: float) -> str:
            '''Write.'''
            with open("big", "wb") as file:
                file.write(bytes(megabytes * 1_000_000))
            time.sleep(seconds)
            return "written"
    """
    (tmp_path / "suite.py").write_text(textwrap.dedent(code))
    limits = Limits(each_disk_bytes=5_000_000, disk_bytes=100_000_000)
    pool = WorkerPool(Sandbox(tmp_path, limits), size=2)
    calls = [
        (pool.sandbox.start_worker(), {"call": "tool", "name": "write", "max_output": 100})
        for _ in range(2)
    ]
    for (_, request), megabytes in zip(calls, (20, 1), strict=True):
        request["arguments"] = {"megabytes": megabytes, "seconds": 5}
    full, other = run(pool, calls, timeout=20)
    assert full.failure is Failure.CRASHED
    assert "the process had more than 5 MB of files" in full.message
    assert other.value == "written"
    pool.close()


def test_more_than_three_hundred_environments_at_once(tmp_path):
    (tmp_path / "suite.py").write_text(textwrap.dedent(DRAWS))
    limits = Limits(processes=Limits().processes + 4 * 300)
    pool = WorkerPool(Sandbox(tmp_path, limits), size=4)
    workers = [pool.sandbox.start_worker() for _ in range(300)]
    assert all(worker.alive for worker in workers)
    for worker in workers:
        worker.kill()
    pool.close()


def test_a_folder_that_a_suite_names_like_another_process_ends_nobody(tmp_path):
    victim = subprocess.Popen(["sleep", "60"], start_new_session=True)
    (tmp_path / "suite.py").write_text(
        f"import os\nos.mkdir('worker-{victim.pid}')\nos.mkdir('worker-x')\n"
        f"open('worker-{victim.pid}/big', 'wb').write(bytes(3_000_000))\n"
    )
    limits = Limits(each_disk_bytes=1_000_000, disk_bytes=100_000_000)
    pool = WorkerPool(Sandbox(tmp_path, limits), size=1)
    worker = pool.sandbox.start_worker()
    time.sleep(3)  # three looks of the guard
    assert victim.poll() is None
    assert worker.alive
    victim.kill()
    victim.wait()
    pool.close()


def test_an_environment_that_does_not_pickle_is_said_where_it_is_looked_at(suite):
    pool = suite('''
        import threading
        from dressage.authoring import Environment, reward_function

        class Locked(Environment):
            def reset(self, case):
                self.lock, self.steps = threading.Lock(), 3

            def go(self) -> str:
                """Go."""
                return "gone"

        @reward_function
        def steps(completions, environments, **columns):
            return [float(e.steps) for e in environments]
    ''')
    worker = pool.sandbox.start_worker()
    case = {"input": "go", "seed": 0}
    worker.call({"call": "open", "name": "Locked", "case": case, "max_output": 100}, 10)
    ((outcome,),) = MeasureRunner([RewardSpec(function="steps")], pool, timeout=10).run(
        [MeasureContext(input="go", expect={})], [worker]
    )
    worker.kill()
    assert outcome.failure is Failure.RAISED
    assert "could not be handed to a reward function" in outcome.message
