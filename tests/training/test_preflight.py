"""What is found out before training: on the tiny model, with real rollouts."""

import json
from types import SimpleNamespace

import pytest

from dressage.authoring.measure import ToolCall
from dressage.spec.event import MeasureVerdict
from dressage.spec.status import Reason
from dressage.spec.training import EvaluationSpec
from tests.training.conftest import events_of
from worker.training.evaluate import split
from worker.training.pipeline.preflight import Failures, failures_of, judged
from worker.training.pipeline.run import run_job
from worker.training.process.failures import RunFailure
from worker.wire.run_dir import MANIFEST

GENEROUS = """
from dressage.authoring import measure, pass_reason, score

@measure
def generous(context):
    return pass_reason("always")

@measure
def lengthy(context):
    return score(min(1.0, len(context.final.text) / 20), "by length")
"""


def report_of(run):
    (report,) = events_of(run, "preflight")
    return report


def test_a_preflight_alone_reports_and_trains_nothing(make_run, arithmetic):
    run = make_run(
        preflight={"cases": 6, "only": True},
        evaluation={"holdout": 0.2},
        training={"max_steps": None, "epochs": 2},
    )
    run_job(run)
    report = report_of(run)
    assert report == json.loads((run.path / MANIFEST).read_text())["result"]["preflight"]
    assert report["verdict"] == "go"
    assert (report["cases"], report["group_size"]) == (6, 4)
    rollouts = events_of(run, "rollout")
    assert len(rollouts) == 24
    assert {r["phase"] for r in rollouts} == {"preflight"}
    passed = [r["reward"] == 1 for r in rollouts]
    assert report["pass_at_1"] == pytest.approx(sum(passed) / 24)
    groups = [passed[at : at + 4] for at in range(0, 24, 4)]
    assert report["pass_at_k"] == pytest.approx(sum(map(any, groups)) / 6)
    mixed = sum(any(group) and not all(group) for group in groups)
    assert report["mixed_groups"] == pytest.approx(mixed / 6)
    training, _ = split(arithmetic.cases[:60], EvaluationSpec(holdout=0.2))
    assert report["time"]["steps"] == 2 * (len(training) // 2)
    assert report["memory"]["available_bytes"] > report["memory"]["peak_bytes"] > 10**8
    assert report["hackable_measures"] == []
    by_name = {agent["name"]: agent for agent in report["null_agents"]}
    assert set(by_name) == {"empty", "echo", "stuffing", "constant", "truncated"}
    assert by_name["empty"]["values"] == {"correct_answer": 0.0}
    assert [e["status"] for e in events_of(run, "status")] == ["preparing", "evaluating"]


def test_looking_changes_nothing_of_what_is_trained(make_run):
    from tests.training.test_pipeline import weights

    plain, looked = make_run("plain"), make_run("looked", preflight={"cases": 4})
    run_job(plain)
    run_job(looked)
    assert all((weights(plain)[k] == v).all() for k, v in weights(looked).items())


def test_a_measure_that_null_agents_satisfy_is_named(make_run):
    run = make_run(
        code={"more.py": GENEROUS},
        rewards=[{"measure": "lengthy", "weight": 0.5}],
        preflight={"cases": 4, "only": True},
    )
    run_job(run)
    report = report_of(run)
    assert report["hackable_measures"] == ["lengthy"]
    assert report["verdict"] == "warn"
    (warning,) = events_of(run, "warning")
    assert warning["code"] == "hackable_measure"
    assert "the measure 'lengthy' gives" in warning["message"]
    assert warning["message"] in report["reasons"]


def test_a_job_that_cannot_learn_stops_before_training_and_goes_on_when_resumed(make_run):
    options = {
        "code": {"more.py": GENEROUS},
        "rewards": [{"measure": "generous"}],
        "preflight": {"cases": 4},
        "training": {"max_steps": 1},
    }
    run = make_run("first", **options)
    with pytest.raises(RunFailure) as caught:
        run_job(run)
    assert caught.value.reason is Reason.NO_LEARNING_SIGNAL
    assert "none of 4 groups has a spread of rewards (every rollout passes)" in caught.value.message
    assert "training" not in [e["status"] for e in events_of(run, "status")]

    again = make_run("second", previous=[run.path], **options)
    run_job(again)
    assert events_of(again, "preflight") == []
    assert (
        json.loads((again.path / MANIFEST).read_text())["result"]["preflight"]["verdict"] == "stop"
    )


@pytest.mark.parametrize(
    ("changes", "verdict", "text"),
    [
        ({}, "go", None),
        ({"mixed_groups": 0.0}, "stop", "there is nothing to learn from"),
        ({"mixed_groups": 0.05}, "warn", "only 5% of the groups"),
        ({"truncated": 0.95}, "stop", "are cut at max_completion_length"),
        ({"truncated": 0.3}, "warn", "30% of the rollouts are cut"),
        ({"unscored": 0.1}, "warn", "a measure fails on 10%"),
        ({"tool_errors": 0.6}, "warn", "60% of the tool calls fail"),
        ({"tool_calls": 0.0}, "warn", "calls no tool"),
    ],
)
def test_the_verdict_follows_from_the_shares(job_spec, changes, verdict, text):
    from dressage.spec.job import JobSpec
    from dressage.spec.preflight import MemoryEstimate, PreflightReport, TimeEstimate

    values = {
        "verdict": "go",
        "reasons": (),
        "cases": 8,
        "group_size": 4,
        "pass_at_1": 0.3,
        "pass_at_k": 0.6,
        "mean_reward": 0.3,
        "mixed_groups": 0.5,
        "unscored": 0.0,
        "truncated": 0.0,
        "tool_errors": 0.1,
        "tool_calls": 1.0,
        "completion_tokens": 40.0,
        "memory": MemoryEstimate(device="cpu", peak_bytes=1, available_bytes=2),
        "time": TimeEstimate(seconds_per_step=1, steps=2, hours=0, gpu_hours=0),
        "null_agents": (),
        "hackable_measures": (),
    }
    report = PreflightReport(**{**values, **changes})
    found, reasons = judged(report, JobSpec.model_validate(job_spec))
    assert found == verdict
    assert text is None or text in reasons[0]


def test_what_fails_most_is_named_with_its_own_words():
    def rollout(error, reason):
        calls = [ToolCall("lookup", {}, None, error), ToolCall("add", {}, "3", None)]
        verdicts = [
            MeasureVerdict(measure="right", value=1.0, reason="", error=None),
            MeasureVerdict(measure="kind", value=None, reason=reason, error="raised"),
        ]
        return SimpleNamespace(verdicts=verdicts, rollout=SimpleNamespace(tool_calls=calls))

    found = failures_of(
        [
            rollout("KeyError: 'x'", "ZeroDivisionError: by zero"),
            rollout("KeyError: 'x'", "ZeroDivisionError: by zero"),
            rollout("no result within 5 seconds", "KeyError: 'y'"),
        ]
    )
    assert found.measure == ": 'kind' most often (ZeroDivisionError: by zero)"
    assert found.tool == ": 'lookup' most often (KeyError: 'x')"
    assert failures_of([]) == Failures()
