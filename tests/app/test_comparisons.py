"""Did it help? Two jobs on the same cases, and stored rollouts under other measures."""

import asyncio

import pytest

from app.db.engine import create_engine, create_sessions, unit_of_work
from app.jobs.repository import save_rollouts
from app.lifecycle.jobs import EventDraft, append_events
from dressage.authoring import Suite
from dressage.spec.event import EventType

CODE = b"""
from dressage.authoring import fail_reason, function_tool, measure, pass_reason, score

@function_tool
def calculate(expression: str) -> str:
    \"\"\"Evaluate.

    Args:
        expression: What.
    \"\"\"
    return "4"

@measure
def right(context):
    right = context.final.text == context.expect["answer"]
    return pass_reason("yes") if right else fail_reason("no")

@measure
def called(context):
    names = [call.name for call in context.tool_calls]
    return pass_reason(str(context.tool_calls[0].result)) if names else fail_reason("no call")

@measure
def length(context):
    return score(min(1.0, len(context.final.text) / 10), f"{len(context.messages)} messages")
"""
CASES = 8


@pytest.fixture
def suite(api):
    records = [{"id": f"c{at}", "input": "2 + 2?", "expect": {"answer": "4"}, "metadata": {"n": at}}
               for at in range(CASES)]  # fmt: skip
    made = Suite(Suite.from_records(records).cases, {"suite.py": CODE})
    for name in ("s", "other"):
        response = api.post("/suites", params={"name": name}, content=made.to_archive())
        assert response.status_code == 201, response.text


@pytest.fixture
def job(api, suite, job_spec, settings):
    """A job with an evaluation before and after, its rollouts, and some of training."""

    def make(before, after, *, name="s", answers=None, train=(), more=()):
        spec = {**job_spec, "suite": name, "rewards": [{"measure": "right"}]}
        response = api.post("/jobs", json=spec)
        assert response.status_code == 201, response.text
        job_id = response.json()["id"]
        evaluations = {"before": (0, before), "after": (2, after)}
        events = [
            EventDraft(
                EventType.EVALUATION,
                {
                    "name": phase,
                    "step": step,
                    "count": len(passed),
                    "mean_reward": sum(passed) / len(passed),
                    "pass_rate": sum(passed) / len(passed),
                    "rewards": {f"c{at}": float(p) for at, p in enumerate(passed)},
                    "passed": {f"c{at}": bool(p) for at, p in enumerate(passed)},
                },
            )
            for phase, (step, passed) in evaluations.items()
        ]
        rollouts = [
            rollout(phase, step, at, 0, "4" if p else (answers or {}).get(at, "5"), float(p))
            for phase, (step, passed) in evaluations.items()
            for at, p in enumerate(passed)
        ]
        rollouts += [
            rollout("train", 1, at, index, text, float(text == "4"), advantage)
            for at, members in enumerate(train)
            for index, (text, advantage) in enumerate(members)
        ]

        async def store():
            engine = create_engine(settings.sqlalchemy_url)
            async with unit_of_work(create_sessions(engine)) as session:
                await append_events(session, job_id, events)
                await save_rollouts(session, job_id, [*rollouts, *more])
            await engine.dispose()

        asyncio.run(store())
        return job_id

    return make


def rollout(phase, step, case, index, text, reward, advantage=None):
    function = {"name": "calculate", "arguments": {"expression": "2+2"}}
    call = {"type": "function", "function": function}
    said = [
        {"role": "system", "content": "Solve the exercise. Use the calculator."},
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "calculate", "content": "4"},
        {"role": "assistant", "content": text},
    ]
    return {
        "id": f"{phase}-{step}-c{case}-{index}",
        "phase": phase,
        "step": step,
        "case_id": f"c{case}",
        "index": index,
        "messages": said,
        "token_ids": [1],
        "roles": "p",
        "stop_reason": "completed",
        "reward": reward,
        "verdicts": [],
        "advantage": advantage,
    }


def test_two_jobs_on_the_same_cases_are_compared_case_by_case(api, job):
    first = job([0] * 8, [1, 1, 0, 0, 0, 0, 0, 0])
    second = job([0] * 8, [1, 0, 1, 1, 1, 1, 0, 0])
    found = api.get("/compare", params={"jobs": f"{first},{second}"}).json()
    assert [(i["job_id"], i["evaluation"], i["pass_rate"]) for i in found["items"]] == [
        (first, "after", 0.25),
        (second, "after", 0.625),
    ]
    (pair,) = found["pairs"]
    assert (pair["better"], pair["worse"]) == (["c2", "c3", "c4", "c5"], ["c1"])
    # Bonett & Price by hand: 4 better, 1 worse, n 8, so (5 − 2)/10 ± 1.96 · sqrt(0.61/10).
    gain = pair["pass_rate"]
    assert gain["difference"] == pytest.approx(0.375)
    half = 1.959964 * ((0.5 + 0.2 - 0.3**2) / 10) ** 0.5
    assert (gain["low"], gain["high"]) == pytest.approx((0.3 - half, 0.3 + half))
    assert pair["notes"] == []
    before = api.get("/compare", params={"jobs": f"{first},{second}", "evaluation": "before"})
    assert before.json()["pairs"][0]["pass_rate"]["difference"] == 0


def test_what_cannot_be_compared_is_refused_with_a_sentence(api, job, job_spec):
    first, other = job([0] * 8, [1] * 8), job([0] * 8, [1] * 8, name="other")
    queued = api.post("/jobs", json={**job_spec, "suite": "s", "rewards": ["right"]}).json()["id"]
    for jobs, status, text in (
        (first, 422, "2 to 10 different jobs"),
        (f"{first},{first}", 422, "2 to 10 different jobs"),
        (f"{first},job_missing", 404, "there is no job 'job_missing'"),
        (f"{first},{other}", 422, f"{first} has s@1, {other} has other@1"),
        (f"{first},{queued}", 422, f"{queued} has no evaluation yet; it is queued"),
    ):
        response = api.get("/compare", params={"jobs": jobs})
        assert response.status_code == status, response.text
        assert text in response.json()["detail"]
    named = {"jobs": f"{first},{job([0] * 8, [1] * 8)}", "evaluation": "step-7"}
    assert "it has before, after" in api.get("/compare", params=named).json()["detail"]


def test_rollouts_are_graded_anew(api, job):
    """By hand: answers of one character are 0.1 long; the training group turns round."""
    job_id = job(
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0],
        answers={3: "a long answer"},
        train=[[("4", 1.5), ("a long answer", -0.5), ("5", -0.5), ("5", -0.5)]],
    )
    body = {"rewards": [{"measure": "length"}], "phases": ["before", "after", "train"]}
    response = api.post(f"/jobs/{job_id}/regrade", json=body)
    assert response.status_code == 200, response.text
    found = response.json()
    phases = {phase["phase"]: phase for phase in found["phases"]}
    assert phases["after"]["rollouts"] == 8
    assert phases["after"]["mean_reward_before"] == pytest.approx(3 / 8)
    assert phases["after"]["mean_reward"] == pytest.approx((7 * 0.1 + 1.0) / 8)
    assert phases["after"]["changed"] == 8
    assert phases["train"]["groups"] == phases["train"]["groups_with_spread"] == 1
    assert phases["train"]["turned"] == 2
    trained = [one for one in found["items"] if one["phase"] == "train"]
    # Rewards 0.1, 1, 0.1, 0.1: mean 0.325, deviation of n − 1 0.45.
    assert [one["advantage"] for one in trained] == pytest.approx(
        [-0.225 / 0.4501, 0.675 / 0.4501, -0.225 / 0.4501, -0.225 / 0.4501]
    )
    assert found["reward_gain"]["difference"] == pytest.approx(0)
    assert found["notes"] == []


def test_measures_see_calls_results_and_cases(api, job):
    job_id = job([0] * 8, [1] * 8)
    found = api.post(f"/jobs/{job_id}/regrade", json={"rewards": ["called", "right"]}).json()
    assert {v["reason"] for one in found["items"] for v in one["verdicts"][:1]} == {"4"}
    assert found["gain"]["difference"] == 1.0
    assert found["gain"]["count"] == 8


def test_a_call_that_failed_is_not_passed_off_as_an_answer(api, job):
    failed, unanswered, asked_again = (rollout("train", 1, at, 0, "4", 1.0) for at in range(3))
    failed["messages"][3]["content"] = '{"error": "no such operator"}'
    unanswered["messages"] = unanswered["messages"][:3]
    asked_again["messages"].append({"role": "user", "content": "Sure?"})
    job_id = job([0] * 8, [1] * 8, more=[failed, unanswered, asked_again])
    body = {"rewards": ["called", "right"], "phases": ["train"]}
    found = api.post(f"/jobs/{job_id}/regrade", json=body).json()
    (note,) = found["notes"]
    assert note.startswith("2 of 3 rollouts have calls that may have failed or were not run")
    # The answer counts though the user spoke after it; a conversation that ends in a call has none.
    assert [one["verdicts"][1]["value"] for one in found["items"]] == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("body", "field", "text"),
    [
        ({"rewards": ["nothing"]}, "rewards.0", "nothing"),
        ({"rewards": ["right"], "phases": ["step-3"]}, "phases", "no rollouts of 'step-3'"),
        ({"rewards": ["right"], "suite": "other"}, "suite", "the job ran on s@1"),
        ({"rewards": []}, "rewards", "at least 1"),
        ({"rewards": ["right"], "limit": 0}, "limit", "greater than or equal to 1"),
    ],
)
def test_a_regrade_that_makes_no_sense_is_refused_by_field(api, job, body, field, text):
    response = api.post(f"/jobs/{job([0] * 8, [1] * 8)}/regrade", json=body)
    assert response.status_code == 422, response.text
    problems = response.json()["errors"]
    assert any(p["field"].startswith(field) and text in p["message"] for p in problems), problems
