"""`POST /measures/preview`: every way in which a measure can fail, told apart."""

import pytest

from dressage.authoring import Suite

CODE = b"""
import time, os
from dressage.authoring import fail_reason, measure, pass_reason, reward_function, score
from dressage.authoring.measure import MeasureResult

@measure
async def right(context):
    said = context.final.text == context.expect["answer"]
    return pass_reason("yes") if said else fail_reason(f"said {context.final.text}")

@measure
def raises(context):
    raise KeyError("oops")

@measure
def wrong_type(context):
    return True

@measure
def too_much(context):
    return score(1.5, "more than all")

@measure
def forged(context):
    return MeasureResult(7.0, "built by hand")

@measure
def slow(context):
    time.sleep(60)

@measure
def dies(context):
    os._exit(1)

@measure
def used(context):
    return score(0.5, f"{context.tool_calls[0].name} in {len(context.messages)} messages")

@reward_function
def length(prompts, completions, answer, **columns):
    return [float(len(c[-1]["content"])) - len(a) for c, a in zip(completions, answer)]

@reward_function
def short_list(prompts, completions, **columns):
    return [1.0]
"""


@pytest.fixture
def preview(api):
    suite = Suite.from_records(
        [{"id": "c1", "input": "2 + 2?", "expect": {"answer": "4"}}, {"id": "c2", "input": "x"}]
    )
    suite = Suite(suite.cases, {"measures.py": CODE})
    response = api.post("/suites", params={"name": "s"}, content=suite.to_archive())
    assert response.status_code == 201, response.text

    def go(*rewards, rollouts=({"case_id": "c1", "answer": "4"},), **options):
        body = {"suite": "s", "rewards": list(rewards), "rollouts": list(rollouts), **options}
        return api.post("/measures/preview", json=body)

    return go


def test_verdicts_and_the_reward_of_given_rollouts(preview):
    rollouts = [{"case_id": "c1", "answer": "4"}, {"case_id": "c1", "answer": "5"}]
    response = preview("right", {"measure": {"type": "contains"}, "weight": 0.5}, rollouts=rollouts)
    assert response.status_code == 200, response.text
    first, second = response.json()["items"]
    assert (first["reward"], first["passed"]) == (1.5, True)
    assert (second["reward"], second["passed"]) == (0.0, False)
    assert second["verdicts"][0]["reason"] == "said 5"


@pytest.mark.parametrize(
    ("measure", "error", "text"),
    [
        ("raises", "raised", "KeyError: 'oops'"),
        ("wrong_type", "wrong_type", "returned bool"),
        ("too_much", "out_of_range", "got 1.5"),
        ("forged", "out_of_range", "got 7.0"),
        ("slow", "timed_out", "no result within 0.5 seconds"),
        ("dies", "crashed", "the process ended"),
        ({"type": "numeric", "field": "total"}, "missing_expectation", "no expect.total"),
    ],
)
def test_failures_have_a_type_and_no_value(preview, measure, error, text):
    item = preview({"measure": measure}, timeout=0.5).json()["items"][0]
    (verdict,) = item["verdicts"]
    assert (verdict["value"], verdict["error"], item["reward"]) == (None, error, None)
    assert text in verdict["reason"]


def test_rollouts_may_bring_their_own_case_calls_and_messages(preview):
    rollout = {
        "input": "q",
        "answer": "4",
        "tool_calls": [{"name": "calculate", "arguments": {}, "result": "4"}],
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "4"}],
    }
    item = preview("used", rollouts=[rollout]).json()["items"][0]
    assert item["verdicts"][0]["reason"] == "calculate in 2 messages"


def test_reward_functions_see_all_rollouts_and_may_give_any_number(preview):
    rollouts = [{"case_id": "c1", "answer": "four!"}, {"case_id": "c1", "answer": ""}]
    items = preview({"function": "length", "weight": 2}, rollouts=rollouts).json()["items"]
    assert [item["reward"] for item in items] == [8.0, -2.0]
    (item, _) = preview({"function": "short_list"}, rollouts=rollouts).json()["items"]
    assert item["verdicts"][0]["error"] == "wrong_type"


@pytest.mark.parametrize(
    ("rewards", "rollouts", "field"),
    [
        (["nobody"], [{"case_id": "c1"}], "rewards.0.measure"),
        ([{"function": "nobody"}], [{"case_id": "c1"}], "rewards.0.function"),
        (["right"], [{"case_id": "c9"}], "rollouts.0.case_id"),
        (
            [{"measure": {"type": "json_schema", "schema": {"type": 7}}}],
            [{"case_id": "c1"}],
            "rewards.0.measure.schema",
        ),
        (
            [
                {
                    "measure": {
                        "type": "llm_judge",
                        "base_url": "http://169.254.169.254/",
                        "model": "m",
                        "rubric": "r",
                    }
                }
            ],
            [{"case_id": "c1"}],
            "rewards.0.measure.base_url",
        ),
    ],
)
def test_bad_requests_name_the_field(preview, rewards, rollouts, field):
    response = preview(*rewards, rollouts=rollouts)
    assert response.status_code == 422
    assert response.json()["errors"][0]["field"] == field


def test_an_unknown_suite_is_named(api):
    body = {"suite": "none", "rewards": ["right"], "rollouts": [{"answer": "x"}]}
    response = api.post("/measures/preview", json=body)
    assert response.json()["errors"] == [
        {"field": "suite", "line": None, "message": "there is no suite 'none'"}
    ]


WORLD = b'''
from dressage.authoring import Environment, measure, score

class Board(Environment):
    def reset(self, case):
        self.board = [case.expect["start"]]

    def place(self, mark: str) -> str:
        """Place.

        Args:
            mark: What.
        """
        self.board.append(mark)
        return "ok"

@measure
def full(context):
    return score(len(context.environment.board) / 4, "".join(context.environment.board))
'''


def test_measures_of_an_environment_see_it_after_the_given_calls(api):
    suite = Suite.from_records([{"id": "c1", "input": "go", "expect": {"start": "s"}}])
    suite = Suite(suite.cases, {"world.py": WORLD})
    assert api.post("/suites", params={"name": "w"}, content=suite.to_archive()).status_code == 201
    calls = [{"name": "place", "arguments": {"mark": mark}, "result": "ok"} for mark in "ab"]
    body = {
        "suite": "w",
        "rewards": ["full"],
        "environment": "Board",
        "rollouts": [{"case_id": "c1", "tool_calls": calls}, {"case_id": "c1"}],
    }
    first, second = api.post("/measures/preview", json=body).json()["items"]
    assert (first["reward"], first["verdicts"][0]["reason"]) == (0.75, "sab")
    assert (second["reward"], second["verdicts"][0]["reason"]) == (0.25, "s")
    unknown = api.post("/measures/preview", json={**body, "environment": "Bord"}).json()
    assert unknown["errors"][0]["field"] == "environment"
    assert "the suite has Board" in unknown["detail"]
    calls[0]["name"] = "take"
    failed = api.post(
        "/measures/preview", json={**body, "rollouts": [{"case_id": "c1", "tool_calls": calls}]}
    )
    assert failed.status_code == 422
    assert "Board.take: " in failed.json()["detail"]


def test_a_number_too_large_to_be_trained_with_is_out_of_range_here_too(api):
    code = b"""
from dressage.authoring import reward_function

@reward_function
def huge(completions, **columns):
    return [1e39] * len(completions)
"""
    suite = Suite.from_records([{"id": "c1", "input": "go"}])
    sent = Suite(suite.cases, {"r.py": code}).to_archive()
    assert api.post("/suites", params={"name": "h"}, content=sent).status_code == 201
    body = {
        "suite": "h",
        "rewards": [{"function": "huge", "weight": 10}],
        "rollouts": [{"case_id": "c1"}],
    }
    (item,) = api.post("/measures/preview", json=body).json()["items"]
    assert (item["reward"], item["verdicts"][0]["error"]) == (None, "out_of_range")
    assert "1e+39" in item["verdicts"][0]["reason"]
    heavy = {**body, "rewards": [{"function": "huge", "weight": 1e308}]}
    assert api.post("/measures/preview", json=heavy).status_code == 422
