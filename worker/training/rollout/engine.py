"""Plays episodes: generate, run the tools of all episodes at once, go on."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dressage.authoring.measure import ToolCall
from dressage.sandbox.pool import SandboxPool
from dressage.spec.event import TokenRole
from dressage.spec.suite import Case
from worker.training.rollout.episode import Episode, StopReason
from worker.training.rollout.template import ConversationTemplate
from worker.training.seeds import derived_seed

Generate = Callable[[list[list[int]], list[int], int], list[list[int]]]


@dataclass(frozen=True)
class EpisodeLimits:
    """What one episode may use. Output in characters, timeout in seconds."""

    completion_tokens: int
    tool_iterations: int
    tool_timeout: float
    tool_output: int


class RolloutEngine:
    """Everything an episode needs except the model."""

    def __init__(
        self,
        *,
        template: ConversationTemplate,
        instructions: str | None,
        sandbox: SandboxPool | None,
        limits: EpisodeLimits,
    ) -> None:
        self._template, self._instructions = template, instructions
        self._sandbox, self._limits = sandbox, limits
        self._tools = template.tool_names

    def play(
        self,
        cases: Sequence[tuple[Case, int]],
        generate: Generate,
        end_ids: frozenset[int],
        seed: int,
    ) -> list[Episode]:
        """Play one episode for each (case, index in its group), all turn by turn together."""
        episodes = [self._opened(case, index) for case, index in cases]
        live = episodes
        turn = 0
        while live:
            prompts = [episode.prompt_ids + episode.completion_ids for episode in live]
            room = [self._limits.completion_tokens - len(e.completion_ids) for e in live]
            written = generate(prompts, room, derived_seed(seed, turn))
            waiting = []
            for episode, prefix, ids in zip(live, prompts, written, strict=True):
                calls = self._take_turn(episode, prefix, ids, end_ids)
                if calls:
                    waiting.append((episode, calls))
            self._run_tools(waiting)
            live = [episode for episode, _ in waiting if episode.stop_reason is None]
            turn += 1
        return episodes

    def prompt_messages(self, case: Case) -> list[dict[str, Any]]:
        """The agent's instructions and the case's input as a conversation."""
        turns: list[dict[str, Any]] = (
            [{"role": "user", "content": case.input}]
            if isinstance(case.input, str)
            else [message.model_dump() for message in case.input]
        )
        if self._instructions:
            turns.insert(0, {"role": "system", "content": self._instructions})
        return turns

    def _opened(self, case: Case, index: int) -> Episode:
        messages = self.prompt_messages(case)
        return Episode(case, index, messages, self._template.prompt(messages))

    def _take_turn(
        self, episode: Episode, prefix: list[int], ids: list[int], end_ids: frozenset[int]
    ) -> list[dict[str, Any]]:
        """Record what the model wrote and return its tool calls, if they are to be run."""
        episode.append(ids, [TokenRole.ACTION] * len(ids))
        message = self._template.parse(ids, prefix)
        episode.messages.append(message)
        calls: list[dict[str, Any]] = message.get("tool_calls") or []
        if not ids or ids[-1] not in end_ids:
            episode.stop_reason = StopReason.MAX_COMPLETION_LENGTH
        elif not calls:
            episode.stop_reason = StopReason.COMPLETED
        elif episode.iterations == self._limits.tool_iterations:
            episode.stop_reason = StopReason.MAX_TOOL_ITERATIONS
        return [] if episode.stop_reason else calls

    def _run_tools(self, waiting: list[tuple[Episode, list[dict[str, Any]]]]) -> None:
        """Run the calls of all episodes side by side, then show each episode its results."""
        flat = [call["function"] for _, calls in waiting for call in calls]
        results = iter(self._results(flat))
        for episode, calls in waiting:
            messages = []
            for call in calls:
                result = next(results)
                episode.tool_calls.append(result)
                episode.tool_failures += result.error is not None
                content = (
                    json.dumps({"error": result.error}, ensure_ascii=False)
                    if result.error is not None
                    else str(result.result)
                )
                name = call["function"]["name"]
                content = content.encode("utf-8", "replace").decode()  # tokenizers refuse the rest
                messages.append({"role": "tool", "name": name, "content": content})
            suffix = self._template.tool_suffix(messages)
            episode.iterations += 1
            # A result that leaves no room for an answer is not shown: the episode ends before it.
            if len(episode.completion_ids) + len(suffix.ids) >= self._limits.completion_tokens:
                episode.stop_reason = StopReason.MAX_COMPLETION_LENGTH
                continue
            episode.messages += messages
            episode.escaped_markup += suffix.escaped
            episode.append(suffix.ids, suffix.roles)

    def _results(self, calls: list[dict[str, Any]]) -> list[ToolCall]:
        problems = [self._problem(call) for call in calls]
        runnable = [call for call, problem in zip(calls, problems, strict=True) if not problem]
        requests = [
            {
                "call": "tool",
                "name": call["name"],
                "arguments": call["arguments"],
                "max_output": self._limits.tool_output,
            }
            for call in runnable
        ]
        outcomes = iter(
            self._sandbox.run(requests, self._limits.tool_timeout)
            if requests and self._sandbox
            else []
        )
        results = []
        for call, problem in zip(calls, problems, strict=True):
            arguments = call["arguments"] if isinstance(call["arguments"], dict) else {}
            if problem:
                results.append(ToolCall(call["name"], arguments, None, problem))
                continue
            outcome = next(outcomes)
            error = outcome.message if outcome.failure else None
            results.append(ToolCall(call["name"], arguments, outcome.value, error))
        return results

    def _problem(self, call: dict[str, Any]) -> str | None:
        if call["name"] not in self._tools:
            have = ", ".join(sorted(self._tools))
            return f"there is no tool {call['name']!r}; the tools are: {have}"
        if not isinstance(call["arguments"], dict):
            return "the arguments must be a JSON object"
        return None
