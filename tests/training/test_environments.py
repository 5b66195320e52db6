"""Stateful environments: one process each, seeded, reset, played, measured, closed."""

import json

import pytest

from dressage.sandbox.pool import WorkerPool
from dressage.sandbox.process import Sandbox, SandboxStartError, Worker
from dressage.spec.event import TokenRole
from dressage.spec.measure import RewardSpec
from dressage.spec.status import Reason
from dressage.spec.suite import Case
from tests.training.conftest import events_of
from tests.training.scripted_sampler import DRAWS, ScriptedSampler
from worker.training.pipeline.run import run_job
from worker.training.process.failures import RunFailure
from worker.training.rewards.weighted import Scorer
from worker.training.rollout.engine import AgentParts, RolloutEngine, RolloutLimits
from worker.training.rollout.rollout import StopReason
from worker.training.rollout.template import ConversationTemplate

CODE = '''
import os, time
from dressage.authoring import Environment, measure, score

LOADED = time.monotonic()

class Counter(Environment):
    async def reset(self, case):
        self.total = case.expect.get("start", 0)
        self.seed = case.seed
        if case.metadata.get("refuses"):
            raise RuntimeError("no power")
        if case.metadata.get("refuses_once") and time.monotonic() < LOADED + 2:
            time.sleep(2)
            raise RuntimeError("not yet")
        return f" (seed {case.seed})" if case.metadata.get("talks") else None

    def add(self, n: int) -> int:
        """Add."""
        self.total += n
        return self.total

    async def die(self) -> str:
        """End the process."""
        os._exit(1)

    def _hidden(self):
        pass

    def close(self):
        raise RuntimeError(f"closed with {self.total}")

@measure
def total(context):
    return score(min(1.0, context.environment.total / 100), str(context.environment.total))
'''


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "world.py").write_text(CODE)
    return tmp_path


@pytest.fixture
def pool(folder):
    pool = WorkerPool(Sandbox(folder), size=4)
    yield pool
    pool.close()


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture
def play(tokenizer, pool):
    """Play cases side by side; `says[i]` is what the model writes in rollout i, turn by turn."""

    def go(cases, says):
        (environment,) = pool.sandbox.environments
        engine = RolloutEngine(
            template=ConversationTemplate(tokenizer, environment["tools"]),
            agent=AgentParts(None, "Counter", seed=5),
            pool=pool,
            limits=RolloutLimits(500, 1024, 4, 5.0, 1000),
        )
        end = tokenizer.eos_token_id
        scripts = {f"question {i}": list(texts) for i, texts in enumerate(says)}

        def write(turn):
            text = tokenizer.decode(turn.prompt)
            script = next(s for q, s in scripts.items() if q in text)
            return [*tokenizer(script.pop(0))["input_ids"], end]

        numbered = [
            case.model_copy(update={"input": f"question {i}"}) for i, case in enumerate(cases)
        ]
        pairs = [(case, 0) for case in numbered]
        rollouts = engine.play(pairs, ScriptedSampler(write, end), DRAWS)
        scored = Scorer([RewardSpec(measure="total")], pool, timeout=5).score(rollouts)
        return rollouts, scored

    return go


def results(rollout):
    return [m["content"] for m in rollout.messages if m["role"] == "tool"]


def case(name, **values):
    return Case(id=name, input="x", **values)


def test_public_methods_are_the_tools(pool):
    (environment,) = pool.sandbox.environments
    assert environment["name"] == "Counter"
    assert [tool["name"] for tool in environment["tools"]] == ["add", "die"]
    assert environment["tools"][0]["parameters"]["required"] == ["n"]


def test_state_lasts_for_one_rollout_and_belongs_to_it_alone(play, monkeypatch):
    closed, call_worker = [], Worker.call

    def noted(worker, request, *rest):
        outcome = call_worker(worker, request, *rest)
        if request["call"] == "close":
            closed.append(outcome.message)
        return outcome

    monkeypatch.setattr(Worker, "call", noted)
    cases = [case("a", expect={"start": 10}), case("b")]
    rollouts, scored = play(
        cases,
        [
            [call("add", n=1) + "\n" + call("add", n=2), call("add", n=3), "done"],
            [call("add", n=50), "done"],
        ],
    )
    assert results(rollouts[0]) == ["11", "13", "16"]
    assert results(rollouts[1]) == ["50"]
    assert [s.reward for s in scored] == [pytest.approx(0.16), pytest.approx(0.5)]
    assert sorted(closed) == [f"RuntimeError: closed with {total}" for total in (16, 50)]
    assert all(rollout.worker is None for rollout in rollouts)


def test_reset_is_given_the_seed_of_its_case_and_may_add_to_the_prompt(play):
    talking = {"metadata": {"talks": True}}
    rollouts, _ = play(
        [case("a", **talking), case("a", **talking), case("b", **talking)], [["ok"]] * 3
    )
    prompts = [rollout.messages[0]["content"] for rollout in rollouts]
    seeds = [prompt.split("(seed ")[1] for prompt in prompts]
    assert prompts[0].startswith("question 0 (seed ")
    assert seeds[0] == seeds[1] != seeds[2]


def test_an_environment_that_fails_to_reset_is_tried_once_more(play):
    rollouts, scored = play([case("a", metadata={"refuses_once": True})], [["ok"]])
    assert rollouts[0].lost is None
    assert scored[0].reward == 0.0


def test_a_lost_environment_is_never_scored(play):
    cases = [case("a", metadata={"refuses": True}), case("b"), case("c")]
    rollouts, scored = play(cases, [[], [call("die"), "x"], [call("add", n=7), "ok"]])
    assert [rollout.stop_reason for rollout in rollouts] == [
        StopReason.ENVIRONMENT_LOST,
        StopReason.ENVIRONMENT_LOST,
        StopReason.COMPLETED,
    ]
    assert rollouts[0].lost == "reset: RuntimeError: no power"
    assert rollouts[1].lost == "die: the process ended during the call"
    assert [s.reward for s in scored] == [None, None, pytest.approx(0.07)]
    assert rollouts[0].roles == [TokenRole.SCAFFOLD]  # nothing of it is trained on


def test_an_environment_without_tools_is_refused_by_name(tmp_path):
    (tmp_path / "world.py").write_text(
        "from dressage.authoring import Environment\n\nclass Empty(Environment):\n    pass\n"
    )
    with pytest.raises(SandboxStartError, match="environment 'Empty' has no public method"):
        Sandbox(tmp_path)


CALCULATOR = '''
from dressage.authoring import Environment, fail_reason, measure, pass_reason

class Calculator(Environment):
    def reset(self, case):
        if case.metadata.get("broken") or BROKEN:
            raise RuntimeError("no power")
        self.calls = []

    def calculate(self, expression: str) -> str:
        """Evaluate arithmetic.

        Args:
            expression: The expression.
        """
        self.calls.append(expression)
        return "42"

@measure
def pressed(context):
    calls = context.environment.calls
    return pass_reason(calls[0]) if calls else fail_reason("never used")
'''


@pytest.fixture
def run_with(make_run, job_spec):
    def go(*, broken, **changes):
        agent = {k: v for k, v in job_spec["agent"].items() if k != "tools"}
        return make_run(
            code={"world.py": CALCULATOR.replace("BROKEN", str(broken))},
            agent={**agent, "environment": "Calculator"},
            rewards=[{"measure": "pressed"}],
            **changes,
        )

    return go


def test_a_run_with_an_environment(run_with):
    run = run_with(broken=False, training={"echo": {"coeff": 0.05}})
    run_job(run)
    rollouts = events_of(run, "rollout")
    used = [r for r in rollouts if any(m["role"] == "tool" for m in r["messages"])]
    assert used
    assert all((r["reward"] == 1.0) == (r in used) for r in rollouts)
    assert events_of(run, "metrics")[0]["values"]["echo/cross_entropy"] > 0


def test_an_environment_that_never_starts_ends_the_run_by_name(run_with):
    run = run_with(broken=True)
    with pytest.raises(RunFailure) as caught:
        run_job(run)
    assert caught.value.reason is Reason.USER_CODE_ERROR
    assert caught.value.message == (
        "the environment fails in every rollout: reset: RuntimeError: no power"
    )


def test_a_rollout_whose_environment_was_lost_says_why(run_with, arithmetic):
    broken = arithmetic.cases[0].model_copy(update={"metadata": {"broken": True}})
    run = run_with(broken=False, cases=(broken, *arithmetic.cases[1:3]), evaluation={"holdout": 0})
    run_job(run)
    rollouts = events_of(run, "rollout")
    lost = [r for r in rollouts if r["case_id"] == broken.id]
    assert lost
    assert {r["error"] for r in lost} == {"reset: RuntimeError: no power"}
    assert {r["error"] for r in rollouts if r not in lost} == {None}
    metrics = [m["values"] for m in events_of(run, "metrics")]
    assert sum(m["environments/lost"] for m in metrics) == len(lost)
