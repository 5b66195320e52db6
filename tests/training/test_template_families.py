"""Roles and stitched token ids for the chat templates of every family we claim to support.

The templates are those that TRL ships; the tokenizer is the tiny agent's with each family's own
control tokens added.
"""

import copy
import re

import pytest
from trl import chat_template_utils as trl_templates

from dressage.spec.event import TokenRole
from tests.training.test_template import TOOL
from worker.training.process.failures import RunFailure
from worker.training.rollout.template import ConversationTemplate

CONTROL = re.compile(r"<\|?[A-Za-z_]+\|?>|\[/?[A-Z_]{3,}\]")
# name: tokens that end a turn, the tokenizer's own first
WITH_TOOLS = {
    "qwen2_5": ["<|im_end|>"],
    "qwen3": ["<|im_end|>"],
    "qwen3_instruct_2507": ["<|im_end|>"],
    "qwen3_5_think": ["<|im_end|>"],
    "qwen3_5_nothink": ["<|im_end|>"],
    "llama3_1": ["<|eot_id|>"],
    "llama3_2": ["<|eot_id|>"],
    "gemma4_v5": ["<turn|>", "<|tool_response>"],
    "gptoss": ["<|return|>", "<|call|>"],
    "glm4moe": ["<|endoftext|>", "<|observation|>"],
    "lfm2_v2": ["<|im_end|>"],
    "nemotron_3_nano": ["<|im_end|>"],
}
WITHOUT_TOOLS = {
    "gemma3": "<end_of_turn>",
    "phi3": "<|end|>",
    "phi3_5": "<|end|>",
    "llama3": "<|eot_id|>",
    "smolvlm": "<end_of_utterance>",
}
MISTRAL = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' %}{% if m.tool_calls %}[TOOL_CALLS]["
    "{% for c in m.tool_calls %}{{ ', ' if not loop.first }}{{ c.function | tojson }}{% endfor %}]"
    "{% else %}{{ m.content }}{% endif %}</s>"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% endif %}{% endfor %}"
)
MISTRAL_CALLS = {
    "defaults": {"role": "assistant"},
    "start_anchor_pattern": r"\[/INST\]|\[/TOOL_RESULTS\]",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\[TOOL_CALLS\]\s*\[",
            "close_pattern": r"\]</s>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"</s>", "content": "text"},
    },
}


@pytest.fixture
def family(tokenizer):
    """`family(template text, [end tokens], …)`: a conversation template of that family."""

    def make(text, ends, tools=(TOOL,), **options):
        own = copy.deepcopy(tokenizer)
        own.add_tokens(sorted({*CONTROL.findall(text), *ends}))
        own.chat_template, own.eos_token, own.response_template = text, ends[0], None
        end_ids = frozenset(own.convert_tokens_to_ids(ends))
        return ConversationTemplate(own, list(tools), end_ids=end_ids, **options)

    return make


def shipped(name):
    return getattr(trl_templates, f"{name}_chat_template")


def call(expression):
    function = {"name": "calculate", "arguments": {"expression": expression}}
    return {"type": "function", "function": function}


def play(template, thought):
    """Two rounds of a call and its result. -> ids with a role each, and the conversation."""
    messages = [
        {"role": "system", "content": "Use the calculator."},
        {"role": "user", "content": "What is 6 * 7 - 2?"},
    ]
    prompt = template.prompt(messages)
    ids, roles = list(prompt), [TokenRole.PROMPT] * len(prompt)
    for expression, result in (("6 * 7", "42"), ("42 - 2", "40")):
        turn = {
            "role": "assistant",
            "content": "",
            "tool_calls": [call(expression)],
            **thought,
        }
        tool = {"role": "tool", "name": "calculate", "content": result}
        header = len(ids)
        whole = template.prompt([*messages, turn, tool])
        suffix = template.tool_suffix([tool])
        action = whole[header : len(whole) - len(suffix.ids)]
        assert template.parse(action, ids)["tool_calls"] == [call(expression)]
        ids += action + suffix.ids
        roles += [TokenRole.ACTION] * len(action) + suffix.roles
        messages += [turn, tool]
    return ids, roles, messages


def text_of(template, ids, roles, role):
    return template.tokenizer.decode([i for i, r in zip(ids, roles, strict=True) if r is role])


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_stitched_conversation_is_what_the_template_renders(family, name):
    template = family(shipped(name), WITH_TOOLS[name])
    thought = {"reasoning_content": "so"} if name == "nemotron_3_nano" else {}
    ids, roles, messages = play(template, thought)
    assert ids == template.prompt(messages)
    assert len(ids) == len(roles)
    observed = text_of(template, ids, roles, TokenRole.OBSERVATION)
    assert observed.replace('"', "") == "4240"
    written = text_of(template, ids, roles, TokenRole.ACTION)
    assert written.count("calculate") == 2
    assert written.count("6 * 7") == 1
    assert any(end in written for end in WITH_TOOLS[name])
    assert "calculator" not in written


@pytest.mark.parametrize("thinking", [True, False])
def test_qwen3_with_and_without_thinking(family, thinking):
    template = family(shipped("qwen3"), ["<|im_end|>"], thinking=thinking)
    thought = {"reasoning_content": "multiply first"} if thinking else {}
    ids, roles, messages = play(template, thought)
    assert ids == template.prompt(messages)
    written = text_of(template, ids, roles, TokenRole.ACTION)
    assert ("multiply first" in written) is thinking
    prompt = text_of(template, ids, roles, TokenRole.PROMPT)
    assert prompt.endswith("</think>\n\n") is not thinking


def test_the_template_that_is_saved_is_the_one_that_trained(family):
    template = family(shipped("qwen3"), ["<|im_end|>"])
    saved = template.tokenizer.chat_template
    assert saved != shipped("qwen3")
    assert "generation %}" not in saved
    turn = {"role": "assistant", "content": "", "tool_calls": [call("1")]}
    conversation = [{"role": "user", "content": "x"}, turn]
    marked = trl_templates.qwen3_training_chat_template
    render = template.tokenizer.apply_chat_template
    assert render(conversation, tokenize=False) == render(
        conversation, tokenize=False, chat_template=marked
    )


@pytest.mark.parametrize("name", WITHOUT_TOOLS)
def test_families_without_tools_train_plain_agents_and_refuse_tools(family, name):
    end = WITHOUT_TOOLS[name]
    text = shipped(name)
    template = family(text.replace("bos_token", "''"), [end], tools=())
    ids = template.prompt(
        [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
        if name == "smolvlm"
        else [{"role": "user", "content": "hello"}]
    )
    assert "hello" in template.tokenizer.decode(ids)
    action = template.tokenizer(f"hi{end}")["input_ids"]
    assert template.parse(action, ids)["content"].startswith("hi")
    with pytest.raises(RunFailure, match=r"does not show|undefined"):
        family(text, [end])


def test_a_job_can_say_how_calls_of_an_unknown_family_are_found(family):
    with pytest.raises(RunFailure, match=r"give agent\.response_template"):
        family(MISTRAL, ["</s>"])
    template = family(MISTRAL, ["</s>"], response_template=MISTRAL_CALLS)
    ids, roles, _ = play(template, {})
    assert text_of(template, ids, roles, TokenRole.OBSERVATION) == "4240"


def test_a_response_template_that_misses_the_calls_is_refused(family):
    wrong = {**MISTRAL_CALLS, "fields": {"content": {"close_pattern": "</s>", "content": "text"}}}
    with pytest.raises(RunFailure, match=r"not found again by agent\.response_template"):
        family(MISTRAL, ["</s>"], response_template=wrong)


def test_a_template_that_rewrites_earlier_turns_is_refused_with_the_first_token(family):
    forgetful = shipped("qwen2_5").replace(
        "{{- '<|im_start|>' + message.role }}",
        "{{- '<|im_start|>' + message.role }}"
        "{% if not loop.last and loop.index < 3 %} old{% endif %}",
    )
    assert forgetful != shipped("qwen2_5")
    with pytest.raises(RunFailure, match=r"token \d+ begins .* in the whole conversation"):
        family(forgetful, ["<|im_end|>"], response_template=trl_templates.qwen3_template)


def test_a_turn_that_no_token_ends_is_refused(family):
    with pytest.raises(RunFailure, match="rewrites earlier turns"):
        family(shipped("gemma4_v5"), ["<|never|>"])


def test_qwen2_5_with_another_system_prompt_is_of_its_family(family):
    text = shipped("qwen2_5").replace(
        "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.", "Be useful."
    )
    assert text != shipped("qwen2_5")
    ids, roles, messages = play(template := family(text, ["<|im_end|>"]), {})
    assert ids == template.prompt(messages)
    assert text_of(template, ids, roles, TokenRole.OBSERVATION) == "4240"


@pytest.mark.parametrize(
    ("template", "missing"),
    [
        ("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}", "tools"),
        (
            "{{ tools }}{% for m in messages if m.role != 'tool' %}{{ m.content }}<|im_end|>"
            "{% endfor %}",
            "the results of tools",
        ),
    ],
)
def test_a_template_says_which_half_it_leaves_out(family, template, missing):
    with pytest.raises(RunFailure, match=f"does not show {missing}, but the agent has tools"):
        family(template, ["<|im_end|>"])


def test_what_trainers_mark_in_a_template_is_not_saved_with_the_model(family):
    marked = shipped("qwen3_instruct_2507").replace(
        "{%- for message in messages %}",
        "{% generation %}{% endgeneration %}{%- for message in messages %}",
    )
    assert marked != shipped("qwen3_instruct_2507")
    template = family(marked, ["<|im_end|>"], response_template=trl_templates.qwen3_template)
    assert "generation %}" not in template.tokenizer.chat_template
