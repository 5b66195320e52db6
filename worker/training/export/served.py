"""Plays rollouts against a server: messages go in, a message comes out, as in production.

The server renders the prompt and reads the tool calls itself; nothing of the trainer's template is
used. What differs from training is what a user would meet.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dressage.spec.agent import AgentSpec
from dressage.spec.chat import FunctionCall, Message, ToolFunction, ToolSchema
from dressage.spec.suite import Case
from worker.training.export.answers import ServedAnswer
from worker.training.model import end_ids
from worker.training.rollout.engine import RolloutEngine, tool_message
from worker.training.rollout.rollout import Rollout, StopReason
from worker.training.rollout.template import ConversationTemplate

# What a server makes of a conversation and its tools as a text; None: it does not say.
Render = Callable[[list[Message], list[ToolSchema]], str | None]
Chat = Callable[[list[Message], list[ToolSchema]], ServedAnswer]


@dataclass(frozen=True)
class Served:
    """A rollout, what the server said of its first turn, and the prompts that it has made."""

    rollout: Rollout
    first: ServedAnswer
    prompts: tuple["Prompt", ...] = ()


@dataclass(frozen=True)
class Prompt:
    """One turn's prompt as text: as training had it, and as it is served."""

    messages: list[Message]
    trained: str
    served: str


class ServedEngine(RolloutEngine):
    """The trainer's engine with a server in place of template and generator."""

    def play_served(self, cases: Sequence[Case], chat: Chat, render: Render | None) -> list[Served]:
        """One rollout for each case, greedily, one after the other."""

        async def one_after_the_other() -> list[Served]:
            return [await self._served(case, chat, render) for case in cases]

        return asyncio.run(one_after_the_other())

    async def _served(self, case: Case, chat: Chat, render: Render | None) -> Served:
        rollout = await self._opened(case, 0)
        first, prompts, tools = None, [], self._template.tools
        while rollout.stop_reason is None:
            if rollout.lost is not None:
                rollout.stop_reason = StopReason.ENVIRONMENT_LOST
                break
            seen = render(rollout.messages, tools) if render else None
            if seen is not None:
                trained = self._template.prompt_text(rollout.messages)
                prompts.append(Prompt(list(rollout.messages), trained, seen))
            answer = chat(rollout.messages, tools)
            first = first or answer
            rollout.messages.append(answer.message)
            calls = [call["function"] for call in answer.message.get("tool_calls") or []]
            if answer.cut_off:
                rollout.stop_reason = StopReason.MAX_COMPLETION_LENGTH
            elif not calls:
                rollout.stop_reason = StopReason.COMPLETED
            elif rollout.iterations == self._limits.tool_iterations:
                rollout.stop_reason = StopReason.MAX_TOOL_ITERATIONS
            else:
                await self._answer(rollout, calls)
        return Served(rollout, first or ServedAnswer({}, None, cut_off=False), tuple(prompts))

    async def _answer(self, rollout: Rollout, calls: list[FunctionCall]) -> None:
        results = await self._results(rollout, calls)
        rollout.tool_calls += results
        rollout.iterations += 1
        wanted = rollout.messages[-1]["tool_calls"]
        for call, result in zip(wanted, results, strict=True):
            message = tool_message(result)
            if call.get("id"):
                message["tool_call_id"] = call["id"]
            rollout.messages.append(message)


def agent_template(
    agent: AgentSpec, tokenizer: Any, tools: Sequence[ToolFunction]
) -> ConversationTemplate:
    """The template that an agent was trained with, for these tools."""
    return ConversationTemplate(
        tokenizer,
        list(tools),
        end_ids=end_ids(agent.model, tokenizer),
        response_template=agent.response_template if tools else None,
        thinking=agent.thinking,
    )
