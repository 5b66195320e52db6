"""Plays episodes against a server: messages go in, a message comes out, as in production.

The server renders the prompt and reads the tool calls itself; nothing of the trainer's template is
used. What differs from training is what a user would meet.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dressage.spec.agent import AgentSpec
from dressage.spec.suite import Case
from worker.training.export.answers import ServedAnswer
from worker.training.rollout.engine import RolloutEngine, tool_message
from worker.training.rollout.episode import Episode, StopReason
from worker.training.rollout.template import ConversationTemplate
from worker.training.update.model import end_ids

Chat = Callable[[list[dict[str, Any]], list[dict[str, Any]]], ServedAnswer]


@dataclass(frozen=True)
class Served:
    """An episode, and what the server said of its first turn."""

    episode: Episode
    first: ServedAnswer


class ServedEngine(RolloutEngine):
    """The trainer's engine with a server in place of template and generator."""

    def play_served(
        self, cases: Sequence[Case], chat: Chat, tools: Sequence[dict[str, Any]]
    ) -> list[Served]:
        """One episode for each case, greedily, one after the other."""
        pairs = [(case, 0) for case in cases]
        opened = [self._opened(*pair) for pair in zip(pairs, self._open(pairs), strict=True)]
        schemas = [{"type": "function", "function": tool} for tool in tools]
        return [self._play(episode, chat, schemas) for episode in opened]

    def _play(self, episode: Episode, chat: Chat, tools: list[dict[str, Any]]) -> Served:
        first = None
        while episode.stop_reason is None:
            if episode.lost is not None:
                episode.stop_reason = StopReason.ENVIRONMENT_LOST
                break
            answer = chat(episode.messages, tools)
            first = first or answer
            episode.messages.append(answer.message)
            calls = [call["function"] for call in answer.message.get("tool_calls") or []]
            if answer.cut_off:
                episode.stop_reason = StopReason.MAX_COMPLETION_LENGTH
            elif not calls:
                episode.stop_reason = StopReason.COMPLETED
            elif episode.iterations == self._limits.tool_iterations:
                episode.stop_reason = StopReason.MAX_TOOL_ITERATIONS
            else:
                self._answer(episode, calls)
        return Served(episode, first or ServedAnswer({}, None, cut_off=False))

    def _answer(self, episode: Episode, calls: list[dict[str, Any]]) -> None:
        results = [self._results([(episode, call)])[0] for call in calls]
        episode.tool_calls += results
        episode.iterations += 1
        wanted = episode.messages[-1]["tool_calls"]
        for call, result in zip(wanted, results, strict=True):
            message = tool_message(result)
            if call.get("id"):
                message["tool_call_id"] = call["id"]
            episode.messages.append(message)


def agent_template(
    agent: AgentSpec, tokenizer: Any, tools: Sequence[dict[str, Any]]
) -> ConversationTemplate:
    """The template that an agent was trained with, for these tools."""
    return ConversationTemplate(
        tokenizer,
        list(tools),
        end_ids=end_ids(agent.model, tokenizer),
        response_template=agent.response_template if tools else None,
        thinking=agent.thinking,
    )
