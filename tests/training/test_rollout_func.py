"""Rollouts played by the suite's own code, with a mask of what its environment wrote."""

import pytest

from dressage.spec.status import Reason
from tests.training.conftest import events_of
from worker.training.pipeline.run import run_job
from worker.training.process.failures import RunFailure

CODE = """
from dressage.authoring import measure, rollout_func, score

@rollout_func
def two_drafts(prompts, model):
    rows = {"prompt_ids": [], "completion_ids": [], "env_mask": [], "messages": []}
    asked = [model.encode(messages) for messages in prompts]
    drafts = model.generate(asked, max_tokens=6)
    remark = model.encode_text("\\nshorter please\\n")
    seen = [p + d + remark for p, d in zip(asked, drafts)]
    finals = model.generate(seen, max_tokens=5)
    for prompt, draft, final in zip(asked, drafts, finals):
        rows["prompt_ids"].append(prompt)
        rows["completion_ids"].append(draft + remark + final)
        rows["env_mask"].append([1] * len(draft) + [0] * len(remark) + [1] * len(final))
        rows["messages"].append([{"role": "assistant", "content": model.decode(final)}])
    return rows

@rollout_func
async def uneven(prompts, model):
    return {"prompt_ids": [[1]] * len(prompts), "completion_ids": [[1]]}

@rollout_func
def empty(prompts, model):
    return {"prompt_ids": [[1]] * len(prompts), "completion_ids": [[]] * len(prompts)}

@rollout_func
def beyond(prompts, model):
    return {"prompt_ids": [[1]] * len(prompts), "completion_ids": [[10**9]] * len(prompts)}

@measure
def short(context):
    assert context.messages[-1]["role"] == "assistant"
    return score(1 / (1 + len(context.final.text)), "by length")
"""


def run_with(make_run, job_spec, function, **training):
    run = make_run(
        code={"rollouts.py": CODE},
        agent={"model": job_spec["agent"]["model"], "rollout_func": function},
        rewards=[{"measure": "short"}],
        training={"max_steps": 1, "mask_truncated_completions": False, **training},
    )
    run_job(run)
    return run


def test_a_rollout_function_plays_and_echo_learns_what_its_environment_wrote(
    make_run, job_spec, tokenizer
):
    run = run_with(make_run, job_spec, "two_drafts", echo={"coeff": 0.1})
    remark = tokenizer("\nshorter please\n")["input_ids"]
    for rollout in events_of(run, "rollout"):
        observed = [
            i for i, role in zip(rollout["token_ids"], rollout["roles"], strict=True) if role == "o"
        ]
        assert observed == remark
        assert 1 <= rollout["roles"].count("a") <= 11
    (metrics,) = events_of(run, "metrics")
    assert metrics["values"]["tokens/observation"] == len(remark)
    assert metrics["values"]["echo/cross_entropy"] > 0


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("uneven", "completion_ids must have one list for each of the"),
        ("empty", "an empty prompt or completion"),
        ("beyond", "no token id"),
    ],
)
def test_what_a_rollout_function_gets_wrong_ends_the_run_by_name(
    make_run, job_spec, function, sentence
):
    with pytest.raises(RunFailure) as caught:
        run_with(make_run, job_spec, function)
    assert caught.value.reason is Reason.USER_CODE_ERROR
    assert caught.value.message.startswith(f"rollout_func {function!r}: ")
    assert sentence in caught.value.message


CONTRACT = """
from dressage.authoring import measure, reward_function, rollout_func, score

@rollout_func
def told(prompts, model, cases):
    assert [set(case) for case in cases] == [
        {"id", "input", "expect", "metadata", "index", "seed"}] * len(prompts)
    asked = [model.encode(messages, tools=[TOOL]) for messages in prompts]
    written = model.generate(asked, max_tokens=4)
    return {
        "prompt_ids": asked,
        "completion_ids": written,
        "messages": [
            [{"role": "assistant", "content": "", "tool_calls": [
                {"type": "function", "id": "1",
                 "function": {"name": "look", "arguments": {"at": 1}}}]},
             {"role": "tool", "tool_call_id": "1", "name": "look", "content": "seen"},
             {"role": "assistant", "content": "yes"},
             {"role": "user", "content": "bye"}]
        ] * len(prompts),
        "stop_reason": ["completed"] * len(prompts),
        "moves": [case["expect"]["answer"] for case in cases],
    }

TOOL = {"type": "function", "function": {"name": "look_there", "description": "Look.",
        "parameters": {"type": "object", "properties": {}}}}

@rollout_func
def moody(prompts, model, cases):
    raise RuntimeError("the simulator is busy")

@measure
def sees(context):
    assert context.final.text == "yes"
    (call,) = context.tool_calls
    assert (call.name, call.arguments, call.result) == ("look", {"at": 1}, "seen")
    assert context.extra == {"moves": context.expect["answer"]}
    return score(0.5, context.stop_reason)

@reward_function
def counts(prompts, completions, moves, **columns):
    assert [len(p) for p in prompts] == [1] * len(prompts)
    assert [len(c) for c in completions] == [4] * len(prompts)
    return [float(len(str(move))) for move in moves]
"""


@pytest.fixture
def contract_run(make_run, job_spec):
    def go(function, **training):
        run = make_run(
            code={"rollouts.py": CONTRACT},
            agent={"model": job_spec["agent"]["model"], "rollout_func": function},
            rewards=[{"measure": "sees"}, {"function": "counts"}],
            training={"max_steps": 1, **training},
            evaluation={"holdout": 0},
        )
        run_job(run)
        return run

    return go


def test_a_rollout_function_knows_its_cases_and_hands_on_what_it_returns(contract_run, tokenizer):
    run = contract_run("told")
    for rollout in events_of(run, "rollout"):
        assert "look_there" in tokenizer.decode(rollout["token_ids"])  # encode showed the tool
        assert [v["error"] for v in rollout["verdicts"]] == [None, None]
        cut = rollout["token_ids"][-1] != tokenizer.eos_token_id
        assert rollout["stop_reason"] == ("max_completion_length" if cut else "completed")


def test_one_that_raises_is_tried_again_and_its_groups_are_dropped(contract_run):
    with pytest.raises(RunFailure, match="the simulator is busy") as caught:
        contract_run("moody")
    assert caught.value.reason is Reason.USER_CODE_ERROR


def test_some_of_its_calls_may_fail(make_run, job_spec):
    code = CONTRACT.replace(
        'raise RuntimeError("the simulator is busy")',
        "if sum(map(ord, cases[0]['id'])) % 2:\n        raise RuntimeError('busy')\n"
        "    return told.function(prompts, model, cases)",
    )
    run = make_run(
        code={"rollouts.py": code},
        agent={"model": job_spec["agent"]["model"], "rollout_func": "moody"},
        rewards=[{"function": "counts"}],
        training={"max_steps": 8, "num_generations": 8},
        evaluation={"holdout": 0},
    )
    run_job(run)
    lost = [m["values"]["environments/lost"] for m in events_of(run, "metrics")]
    assert {*lost} == {0.0, 8.0}
    dropped = [m["values"]["groups/dropped"] for m in events_of(run, "metrics")]
    assert [share == 1.0 for share in dropped] == [count == 8.0 for count in lost]
    assert any("busy" in (r["error"] or "") for r in events_of(run, "rollout"))


def test_echo_without_a_mask_is_refused(make_run, job_spec):
    run = make_run(
        code={"rollouts.py": CONTRACT},
        agent={"model": job_spec["agent"]["model"], "rollout_func": "told"},
        rewards=[{"measure": "sees"}],
        training={"max_steps": 1, "echo": {"coeff": 0.1}},
        evaluation={"holdout": 0},
    )
    with pytest.raises(RunFailure, match="return env_mask"):
        run_job(run)
