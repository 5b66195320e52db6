import pytest
from hypothesis import given
from hypothesis import strategies as st

from dressage.sandbox.pool import WorkerPool
from dressage.sandbox.process import Sandbox
from dressage.spec.measure import RewardSpec
from dressage.spec.suite import Case
from worker.training.rewards.weighted import Scorer, group_rewards
from worker.training.rollout.rollout import Rollout, StopReason

CODE = """
import os, time
from dressage.authoring import fail_reason, measure, pass_reason, score

LOADED = time.monotonic()

@measure
def right(context):
    same = context.final.text == context.expect["answer"]
    return pass_reason("ok") if same else fail_reason("no")

@measure
async def half(context):
    return score(0.5, "half")

@measure
def broken(context):
    raise KeyError("oops")

@measure
def once(context):
    if time.monotonic() < LOADED + 2:
        time.sleep(2)
        os._exit(1)
    return pass_reason("second try")
"""


@pytest.fixture
def sandbox(tmp_path):
    (tmp_path / "measures.py").write_text(CODE)
    pool = WorkerPool(Sandbox(tmp_path), size=2)
    yield pool
    pool.close()


def rollout(text, answer="4"):
    return Rollout(
        case=Case(id="c", input="q", expect={"answer": answer}),
        index=0,
        messages=[{"role": "user", "content": "q"}, {"role": "assistant", "content": text}],
        prompt_ids=[1],
        prompt_length=1,
        stop_reason=StopReason.COMPLETED,
    )


def score(sandbox, *rewards, rollouts=None):
    specs = [RewardSpec(measure=name, weight=weight) for name, weight in rewards]
    return Scorer(specs, sandbox, timeout=5).score(rollouts or [rollout("4")])


def test_the_reward_is_the_weighted_sum(sandbox):
    right, wrong = score(
        sandbox, ("right", 1.0), ("half", 0.2), rollouts=[rollout("4"), rollout("5")]
    )
    assert (right.reward, wrong.reward) == (pytest.approx(1.1), pytest.approx(0.1))
    assert [verdict.reason for verdict in wrong.verdicts] == ["no", "half"]
    assert (right.passed, wrong.passed) == (True, False)  # by what says pass or fail


def test_a_penalty_does_not_decide_whether_a_case_is_solved(sandbox):
    (scored,) = score(sandbox, ("right", 1.0), ("half", -0.2))
    assert (scored.reward, scored.passed) == (pytest.approx(0.9), True)


def test_built_in_measures_count_like_the_suites_own(sandbox):
    specs = [
        RewardSpec(measure="right", weight=1.0),
        RewardSpec.model_validate({"measure": {"type": "numeric"}, "weight": 0.5}),
        RewardSpec.model_validate({"measure": {"type": "exact_match", "field": "other"}}),
    ]
    (scored,) = Scorer(specs[:2], sandbox, timeout=5).score([rollout("4")])
    assert (scored.reward, scored.passed) == (1.5, True)
    (scored,) = Scorer(specs, sandbox, timeout=5).score([rollout("4")])
    assert scored.reward is None
    assert scored.verdicts[2].reason == "the case has no expect.other"


def test_a_measure_that_raises_gives_no_reward_never_zero(sandbox):
    (scored,) = score(sandbox, ("right", 1.0), ("broken", 1.0))
    assert scored.reward is None
    assert scored.verdicts[1].value is None
    assert scored.verdicts[1].reason == "KeyError: 'oops'"


def test_a_measure_whose_process_dies_is_tried_once_more(sandbox):
    (scored,) = score(sandbox, ("once", 1.0))
    assert (scored.reward, scored.verdicts[0].reason) == (1.0, "second try")


@given(st.lists(st.lists(st.one_of(st.none(), st.floats(0, 1)), min_size=3, max_size=3)))
def test_a_missing_reward_drops_its_whole_group_and_no_other(groups):
    flat = [reward for group in groups for reward in group]
    got = group_rewards(flat, 3)
    expected = [[None] * 3 if None in group else group for group in groups]
    assert got == [reward for group in expected for reward in group]
