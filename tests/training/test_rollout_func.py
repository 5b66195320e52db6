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
