"""The prompts that llama.cpp, and Ollama with it, makes of frozen templates are the trained ones.

The matrix: every family that trains agents with tools, seven kinds of conversation, tools as Ollama
hands them on. The engine is the one that serves; the templates are those that TRL ships.
"""

import copy
import datetime

import pytest

from dressage.spec.tool_schema import for_ollama
from tests.ollama_server import as_ollama_has
from tests.training.test_template import TOOL
from tests.training.test_template_families import CONTROL, WITH_TOOLS, shipped
from worker.training.export.gguf import GgufModel
from worker.training.rollout.frozen import frozen_template
from worker.training.rollout.template import ConversationTemplate

DAY = datetime.date(2026, 11, 29)
RICH = {
    "name": "look_up",
    "description": "Find some.",
    "parameters": {
        "type": "object",
        "required": ["words"],
        "properties": {
            "words": {"type": "array", "items": {"type": "string"}, "description": "What for."},
            "limit": {"type": "integer", "description": "How many.", "default": 3, "minimum": 1},
        },
    },
}


def call(name="calculate", **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def said(text, *calls):
    return {"role": "assistant", "content": text, **({"tool_calls": [*calls]} if calls else {})}


def result(text, name="calculate"):
    return {"role": "tool", "name": name, "content": text}


SYSTEM = {"role": "system", "content": 'Be exact: "quotes", <tags>, é, 日本, a\\b & c.'}
USER = {"role": "user", "content": "What is 6 * 7?"}
ROUND = [USER, said("", call(expression="6 * 7")), result("42")]
CONVERSATIONS = {
    "plain": ([USER], False),
    "system and odd characters": ([SYSTEM, USER], False),
    "tools": ([USER], True),
    "tools and system": ([SYSTEM, USER], True),
    "a round": ([SYSTEM, *ROUND], True),
    "text beside a call": ([USER, said("I look.", call(expression="6 * 7")), result("42")], True),
    "a second question": ([*ROUND, said("42."), {"role": "user", "content": "And 7 * 7?"}], True),
}
TWO_CALLS = [USER, said("", call(expression="1"), call(expression="2")), result("1"), result("2")]
# What a thinking model thought before an earlier answer is left out by some, an empty one is not.
# Gemma 4 takes a message with words and a call for the end of a turn, and llama.cpp does not.
SHOWN_OTHERWISE = {("qwen3_6", "a second question"), ("gemma4_v5", "text beside a call")}
FAMILIES = {
    **WITH_TOOLS,
    "qwen3_6": ["<|im_end|>"],
    "qwen3_8": ["<|im_end|>"],
    "lfm2_2_5": ["<|im_end|>"],
}


@pytest.fixture
def trained(tokenizer):
    """`trained(name, tools, …)`: the template as a job with these tools trains it."""

    def make(name, tools=(TOOL, RICH), **options):
        own = copy.deepcopy(tokenizer)
        own.add_tokens(sorted({*CONTROL.findall(shipped(name)), *FAMILIES[name]}))
        own.chat_template, own.response_template = shipped(name), None
        own.eos_token = FAMILIES[name][0]
        ends = frozenset(own.convert_tokens_to_ids(FAMILIES[name]))
        shown = [for_ollama(tool)[0] for tool in tools]
        return ConversationTemplate(own, shown, end_ids=ends, date=DAY, **options)

    return make


def differences(gguf, template, tools):
    model = GgufModel(gguf, context_length=256, chat_template=template.tokenizer.chat_template)
    first = template.tokenizer.bos_token or ""
    found = {}
    for name, (messages, with_tools) in CONVERSATIONS.items():
        if with_tools != bool(tools):
            continue
        served = model.render(messages, [as_ollama_has(t) for t in template.tools])
        ours = template.prompt_text(messages)
        if served.removeprefix(first) != ours.removeprefix(first):
            found[name] = (ours, served)
    if tools and not template.one_call_a_turn:
        served = model.render(TWO_CALLS, [as_ollama_has(t) for t in template.tools])
        ours = template.prompt_text(TWO_CALLS)
        if served.removeprefix(first) != ours.removeprefix(first):
            found["two calls"] = (ours, served)
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_served_is_what_was_trained(base_gguf, trained, name):
    for tools in ((TOOL, RICH), ()):
        found = differences(base_gguf, trained(name, tools), tools)
        assert {(name, kind) for kind in found} <= SHOWN_OTHERWISE, found


@pytest.mark.parametrize("thinking", [True, False, None])
@pytest.mark.parametrize("name", ["qwen3", "gemma4_v5", "qwen3_5_think"])
def test_nothing_that_a_client_says_of_thinking_changes_the_prompt(
    base_gguf, trained, name, thinking
):
    template = trained(name, thinking=thinking)
    model = GgufModel(base_gguf, context_length=256, chat_template=template.tokenizer.chat_template)
    tools = [as_ollama_has(tool) for tool in template.tools]
    ours = template.prompt_text([USER])
    for said in (True, False):
        options = {"chat_template_kwargs": {"enable_thinking": said}}
        assert model.render([USER], tools, **options) == ours
    if thinking is None:  # as the template has it by itself
        assert shipped(name) != template.tokenizer.chat_template


def test_a_template_is_frozen_once_and_with_one_date(trained):
    template = trained("llama3_2")
    assert "Today Date: 29 Nov 2026" in template.prompt_text([USER])
    again = copy.deepcopy(template.tokenizer)
    later = ConversationTemplate(
        again, [TOOL], end_ids=template_ends(again), date=datetime.date(2027, 1, 1)
    )
    assert later.tokenizer.chat_template == template.tokenizer.chat_template


def template_ends(tokenizer):
    return frozenset(tokenizer.convert_tokens_to_ids(["<|eot_id|>"]))


def test_a_template_that_asks_for_nothing_is_left_alone(trained):
    assert trained("qwen2_5").tokenizer.chat_template == shipped("qwen2_5")


def test_a_clock_inside_of_a_template_stands_still():
    text = "Current date: {{ strftime_now('%Y-%m-%d') }}"
    frozen = frozen_template(text, lambda t, _: t, thinking=None, date=DAY)
    assert frozen.endswith("Current date: {{ '2026-11-29' }}")
