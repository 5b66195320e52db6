import json

from hypothesis import given
from hypothesis import strategies as st

from dressage.seeds import derived_seed
from dressage.spec.measure import RewardSpec
from dressage.spec.suite import Case
from dressage.spec.training import EvaluationSpec
from tests.training.conftest import events_of
from worker.training.evaluate import CaseScore, divided, gained, split, summary
from worker.training.pipeline.run import run_job
from worker.wire.run_dir import MANIFEST

CASES = [Case(id=str(n), input=f"question {n}", expect={"answer": n}) for n in range(1000)]
REWARDS = (RewardSpec(measure="right"),)


def sides(cases, **evaluation):
    training, held_out = split(cases, EvaluationSpec(**evaluation))
    return {case.id for case in training}, {case.id for case in held_out}


def test_about_the_share_is_held_out_and_nothing_is_lost():
    training, held_out = sides(CASES, holdout=0.2)
    assert len(training) + len(held_out) == 1000
    assert 170 < len(held_out) < 230
    assert sides(CASES, holdout=0)[1] == set()


@given(st.integers(2, 12), st.sampled_from([0.001, 0.1, 0.5, 0.9]))
def test_both_sides_have_a_case_however_small_the_suite(count, holdout):
    training, held_out = sides(CASES[:count], holdout=holdout)
    assert training
    assert held_out


def test_a_longer_suite_keeps_every_old_case_on_its_side():
    training, held_out = sides(CASES[:500], holdout=0.2)
    more_training, more_held_out = sides(CASES, holdout=0.2)
    assert training < more_training
    assert held_out < more_held_out


def test_equal_cases_under_other_ids_are_on_one_side():
    again = [case.model_copy(update={"id": f"again {case.id}"}) for case in CASES]
    _, held_out = sides([*CASES, *again], holdout=0.3)
    assert {i.removeprefix("again ") for i in held_out} == {i for i in held_out if " " not in i}
    evaluation = EvaluationSpec(holdout=0.3, every_steps=1)
    choosing, proof = divided(split([*CASES, *again], evaluation)[1], evaluation)
    assert not {c.input for c in choosing} & {c.input for c in proof}
    assert abs(len(choosing) - len(proof)) <= 2


def scores(passed):
    return [CaseScore(str(n), float(p), p) for n, p in enumerate(passed)]


def test_cases_without_a_verdict_are_left_out_and_counted_as_failed_beside():
    lost = CaseScore("lost", None, passed=False)
    result = summary("after", 3, [*scores([True, True, False]), lost], REWARDS)
    assert (result.count, result.unscored) == (3, 1)
    assert (result.pass_rate, result.pass_rate_of_all) == (2 / 3, 0.5)


def test_without_a_reward_that_can_say_it_there_is_no_pass_rate():
    penalty = (RewardSpec(measure="slow", weight=-1),)
    before = summary("before", 0, scores([True] * 30), penalty)
    assert (before.pass_rate, before.passed) == (None, {})
    gain, reward_gain = gained(before, before)
    assert gain is None
    assert reward_gain.difference == 0


def test_seeds_differ_by_every_part():
    seeds = {derived_seed(0, "train", step, case) for step in range(50) for case in range(50)}
    assert len(seeds) == 2500
    assert derived_seed(1, 23) != derived_seed(12, 3)
    assert derived_seed(0, "train", 1) == derived_seed(0, "train", 1)


def test_a_model_is_measured_without_training(make_run, job_spec):
    """`"training": null`: the same held-out cases and draws as before a training."""
    trained = make_run("trained", training={"max_steps": 1}, evaluation={"holdout": 0.1})
    run_job(trained)
    only = make_run("only", evaluation={"holdout": 0.1, "only": True})
    run_job(only)
    (measured,) = events_of(only, "evaluation")
    before = events_of(trained, "evaluation")[0]
    assert (measured["name"], measured["step"]) == ("before", 0)
    assert measured["passed"] == before["passed"]
    assert [e["status"] for e in events_of(only, "status")] == ["preparing", "evaluating"]
    manifest = json.loads((only.path / MANIFEST).read_text())
    assert manifest["files"] == []
    assert manifest["result"]["cases"]["held_out"] == before["count"]
    assert not events_of(only, "progress")
