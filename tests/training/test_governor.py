"""Groups without a spread of rewards: counted, replaced, and at last a reason to pause."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dressage.spec.status import Reason
from tests.training.conftest import events_of
from tests.training.test_preflight import GENEROUS
from worker.training.pipeline.run import run_job
from worker.training.process.failures import RunFailure
from worker.training.update.governor import SignalGovernor
from worker.wire.checkpoints import newest_complete

PICKY = """
from dressage.authoring import measure, score

@measure
def picky(context):
    easy = int(context.metadata["number"]) % 2
    return score(len(context.final.text) / 1000 if easy else 0.0, "by length, for odd cases")
"""


@given(st.lists(st.booleans(), max_size=30), st.integers(1, 5))
def test_it_is_exhausted_after_so_many_dead_steps_in_a_row(steps, patience):
    governor = SignalGovernor(patience)
    for dead in steps:
        governor.observe([False, not dead, None])
    tail = len(steps) - next((i + 1 for i in reversed(range(len(steps))) if not steps[i]), 0)
    assert governor.dead_steps == tail
    assert governor.exhausted is (tail >= patience)


def test_dropped_groups_say_nothing():
    governor = SignalGovernor(1)
    governor.observe([None, None])
    assert not governor.exhausted


def test_groups_whose_rollouts_are_all_cut_and_masked_teach_nothing(make_run):
    run = make_run(training={"max_completion_length": 3, "pause_after_dead_steps": 1})
    with pytest.raises(RunFailure, match="1 steps in a row") as caught:
        run_job(run)
    assert caught.value.reason is Reason.NO_LEARNING_SIGNAL
    (metrics,) = [m["values"] for m in events_of(run, "metrics")]
    assert metrics["completions/clipped_ratio"] == 1.0
    assert metrics["completions/mean_length"] == 3.0


def test_a_run_without_signal_pauses_with_a_checkpoint_and_goes_on_from_it(make_run):
    options = {
        "code": {"more.py": GENEROUS},
        "rewards": [{"measure": "generous"}],
        "training": {"max_steps": 5, "pause_after_dead_steps": 2},
    }
    run = make_run("first", **options)
    with pytest.raises(RunFailure) as caught:
        run_job(run)
    assert caught.value.reason is Reason.NO_LEARNING_SIGNAL
    assert "2 steps in a row" in caught.value.message
    assert newest_complete([run.path]).name == "checkpoint-2"
    again = make_run("second", previous=[run.path], **options)
    with pytest.raises(RunFailure, match="paused at step 4"):
        run_job(again)


def test_dead_groups_are_replaced_by_other_cases(make_run, arithmetic):
    cases = tuple(
        case.model_copy(update={"metadata": {"number": number}})
        for number, case in enumerate(arithmetic.cases[:40])
    )
    options = {"code": {"picky.py": PICKY}, "cases": cases, "rewards": [{"measure": "picky"}]}
    plain = make_run("plain", **options)
    run_job(plain)
    replaced = make_run("replaced", training={"resample_dead_groups": 4}, **options)
    run_job(replaced)

    def total(run, name):
        return sum(m["values"][name] for m in events_of(run, "metrics"))

    assert total(plain, "groups/no_spread") > 0
    assert total(plain, "groups/resampled") == 0
    assert total(replaced, "groups/resampled") > 0
    assert total(replaced, "groups/no_spread") < total(plain, "groups/no_spread")
    odd = {case.id for case in cases if case.metadata["number"] % 2}
    trained = [r for r in events_of(replaced, "rollout") if r["phase"] == "train"]
    assert len(trained) == 16
    assert sum(r["case_id"] in odd for r in trained) >= 12
