import copy
import math

import pytest

from dressage.sandbox.pool import WorkerPool
from dressage.sandbox.process import Sandbox
from dressage.spec.event import TokenRole
from dressage.spec.suite import Case
from tests.conftest import TINY_MODEL
from tests.training.scripted_sampler import DRAWS, ScriptedSampler
from tests.training.test_template_families import CONTROL, MISTRAL, shipped
from worker.training.model import end_ids
from worker.training.rollout.engine import AgentParts, RolloutEngine, RolloutLimits
from worker.training.rollout.rollout import StopReason
from worker.training.rollout.template import ConversationTemplate

CODE = '''
from dressage.authoring import function_tool

@function_tool
def double(n: int) -> dict:
    """Double."""
    return {"is": 2 * n}

@function_tool
def fail(n: int) -> str:
    """Fail."""
    raise RuntimeError(f"no {n}")

@function_tool
def long(n: int) -> str:
    """Say much."""
    return "word " * n
'''


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory):
    folder = tmp_path_factory.mktemp("code")
    (folder / "tools.py").write_text(CODE)
    pool = WorkerPool(Sandbox(folder), size=2)
    yield pool
    pool.close()


@pytest.fixture
def play(tokenizer, sandbox):
    """Play one rollout in which the model says the given texts, turn by turn."""

    def go(*says, completion_tokens=400, context_tokens=1024, tool_iterations=3, ends=True):
        template = ConversationTemplate(tokenizer, sandbox.sandbox.tools)
        engine = RolloutEngine(
            template=template,
            agent=AgentParts("Be brief.", None, 0),
            pool=sandbox,
            limits=RolloutLimits(completion_tokens, context_tokens, tool_iterations, 5.0, 1000),
        )
        turns = iter(says)
        end = tokenizer.eos_token_id

        def write(_turn):
            return tokenizer(next(turns))["input_ids"] + ([end] if ends else [])

        case = Case(id="c", input="question")
        (rollout,) = engine.play([(case, 0)], ScriptedSampler(write, end), DRAWS)
        for of_each in (rollout.roles, rollout.logps, rollout.versions, rollout.origins):
            assert len(of_each) == len(rollout.completion_ids)
        for role, logp, version in zip(rollout.roles, rollout.logps, rollout.versions, strict=True):
            drawn = (logp, version) == (-1.0, 0)
            assert drawn if role is TokenRole.ACTION else math.isnan(logp) and version == -1
        return rollout

    return go


def call(name, **arguments):
    import json

    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def tool_messages(rollout):
    return [m["content"] for m in rollout.messages if m["role"] == "tool"]


def test_an_answer_without_tools_is_one_turn(play):
    rollout = play("The answer is 4.")
    assert rollout.stop_reason is StopReason.COMPLETED
    assert rollout.final_text == "The answer is 4."
    assert [m["role"] for m in rollout.messages] == ["system", "user", "assistant"]
    assert set(rollout.roles) == {TokenRole.ACTION}


def test_a_tool_result_reaches_the_model_as_json(play):
    rollout = play(call("double", n=4), "8")
    assert tool_messages(rollout) == ['{"is": 8}']
    assert rollout.final_text == "8"
    assert rollout.tool_calls[0].result == '{"is": 8}'


def test_several_calls_of_one_turn_keep_their_order(play):
    rollout = play(call("double", n=1) + "\n" + call("fail", n=2) + "\n" + call("double", n=3), "x")
    assert tool_messages(rollout) == ['{"is": 2}', '{"error": "RuntimeError: no 2"}', '{"is": 6}']
    assert rollout.tool_failures == 1


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (call("teleport", n=1), "there is no tool 'teleport'; the tools are: double, fail, long"),
        (call("double", m=1), "arguments do not fit double"),
        (call("double", n="many"), "arguments do not fit double"),
    ],
)
def test_a_wrong_call_is_an_error_the_model_can_read(play, text, error):
    rollout = play(text, "sorry")
    assert error in tool_messages(rollout)[0]
    assert rollout.stop_reason is StopReason.COMPLETED
    assert rollout.tool_failures == 1


def test_the_number_of_returns_to_the_model_is_limited(play):
    rollout = play(*[call("double", n=1)] * 3, tool_iterations=2)
    assert rollout.stop_reason is StopReason.MAX_TOOL_ITERATIONS
    assert len(tool_messages(rollout)) == 2
    assert rollout.final_text == ""


def test_an_unfinished_turn_is_truncated(play):
    rollout = play("one two three four five six seven", completion_tokens=4, ends=False)
    assert rollout.truncated
    assert len(rollout.completion_ids) == 4


def test_a_result_that_leaves_no_room_is_not_shown(play):
    rollout = play(call("long", n=150), completion_tokens=120)
    assert rollout.truncated
    assert tool_messages(rollout) == []
    assert len(rollout.completion_ids) <= 120
    assert set(rollout.roles) == {TokenRole.ACTION}


def test_the_models_context_is_a_limit_of_its_own(play):
    whole = play(call("long", n=30), "x", completion_tokens=900)
    used = len(whole.prompt_ids) + len(whole.completion_ids)
    cut = play(call("long", n=30), completion_tokens=900, context_tokens=used - 20)
    assert cut.truncated
    assert tool_messages(cut) == []
    assert len(cut.prompt_ids) + len(cut.completion_ids) < used - 20


def test_a_prompt_that_fills_the_context_ends_its_rollout_and_no_other(play):
    rollout = play("x", context_tokens=50)
    assert rollout.stop_reason == "environment_lost"
    assert "leaves no room in the model's context of 50" in rollout.lost
    assert len(rollout.prompt_ids) + len(rollout.completion_ids) == 50


@pytest.mark.parametrize(
    "name", ["", "end", "im", "n", "|", "<|im_end|>", "tool_call", "user\n", "é" * 50, "null"]
)
def test_what_a_model_calls_is_data_whatever_its_name(play, name):
    rollout = play(call(name, n=1), "sorry", completion_tokens=900)
    assert rollout.stop_reason is StopReason.COMPLETED
    (message,) = tool_messages(rollout)
    assert "there is no tool" in message
    assert rollout.final_text == "sorry"
    assert rollout.messages[-2]["name"] in (name, "unknown")


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("<tool_call>\n" + "[" * 3000, 0),
        ('<tool_call>\n{"name": "double", "arguments": ' + "[" * 3000, 0),
        (
            '<tool_call>\n{"name": "double", "arguments": {"n": '
            + "[" * 300
            + "1"
            + "]" * 300
            + "}}\n</tool_call>",
            1,
        ),
    ],
)
def test_brackets_without_end_are_data_too(play, text, calls):
    rollout = play(text, "sorry", completion_tokens=900)
    assert len(rollout.tool_calls) == calls
    if calls:
        assert "nested too deeply" in tool_messages(rollout)[0]


def test_names_that_are_in_the_markup_are_names_of_tools_like_others(tokenizer):
    for name in ("end", "im", "tool", "n", "start"):
        tool = {
            "name": name,
            "description": "Do.",
            "parameters": {"type": "object", "properties": {}},
        }
        template = ConversationTemplate(tokenizer, [tool])
        suffix = template.tool_suffix([{"role": "tool", "name": name, "content": "body"}])
        observed = [
            i for i, r in zip(suffix.ids, suffix.roles, strict=True) if r is TokenRole.OBSERVATION
        ]
        assert tokenizer.decode(observed) == "body"


def test_calls_beyond_what_the_template_can_show_are_not_played_and_counted(
    tokenizer, sandbox, monkeypatch
):
    monkeypatch.setattr(ConversationTemplate, "_shows_two_calls", lambda _: False)
    template = ConversationTemplate(tokenizer, sandbox.sandbox.tools)
    engine = RolloutEngine(
        template=template,
        agent=AgentParts(None, None, 0),
        pool=sandbox,
        limits=RolloutLimits(400, 1024, 3, 5.0, 1000),
    )
    says = iter([call("double", n=1) + "\n" + call("double", n=2), "done"])
    end = tokenizer.eos_token_id
    (rollout,) = engine.play(
        [(Case(id="c", input="q"), 0)],
        ScriptedSampler(lambda _: [*tokenizer(next(says))["input_ids"], end], end),
        DRAWS,
    )
    assert tool_messages(rollout) == ['{"is": 2}']
    assert len(rollout.messages[1]["tool_calls"]) == 1
    refused, played = rollout.tool_calls
    assert (played.result, refused.result) == ('{"is": 2}', None)
    assert "shows one call in a message" in refused.error
    assert rollout.tool_failures == 1


@pytest.mark.parametrize(
    ("text", "content", "thought"),
    [
        ("<think>42?</think>Seven.", "Seven.", "42?"),
        ("42?</think>\n\nSeven.", "Seven.", "42?"),
        ("<think>a</think>b</think> Seven. ", "Seven.", "a</think>b"),
        ("<think>42 for ever", "", "42 for ever"),
        ("Seven.", "Seven.", None),
    ],
)
def test_thoughts_are_no_part_of_the_answer(tokenizer, text, content, thought):
    own = copy.deepcopy(tokenizer)
    own.chat_template = shipped("qwen3").replace("tools", "no_tools")
    template = ConversationTemplate(own, [])
    message = template.parse(own(text)["input_ids"], own("x")["input_ids"])
    assert (message["content"], message.get("reasoning_content")) == (content, thought)


@pytest.mark.parametrize(
    ("family", "ends"),
    [
        ("qwen2_5", {"<|im_end|>"}),
        ("qwen3", {"<|im_end|>"}),
        ("llama3_1", {"<|eot_id|>"}),
        ("gemma3", {"<end_of_turn>"}),
        ("phi3", {"<|end|>"}),
        ("mistral", {"</s>"}),
    ],
)
def test_a_turn_ends_where_its_template_ends_it_whatever_the_model_says(tokenizer, family, ends):
    """A base model, whose `eos_token` is another one."""
    own = copy.deepcopy(tokenizer)
    text = MISTRAL if family == "mistral" else shipped(family).replace("bos_token", "''")
    own.add_tokens(sorted({*CONTROL.findall(text), *ends, "<|endoftext|>"}))
    own.chat_template, own.eos_token = text, "<|endoftext|>"
    assert {own.decode([i]) for i in end_ids(TINY_MODEL, own)} >= ends | {"<|endoftext|>"}
