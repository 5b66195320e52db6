"""Plays rollouts: generate, run the tools of all rollouts at once, repeat."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Protocol

from dressage.authoring.measure import ToolCall
from dressage.sandbox.pool import WorkerPool
from dressage.sandbox.process import Outcome, Worker
from dressage.spec.chat import FunctionCall, Message
from dressage.spec.event import TokenRole
from dressage.spec.status import Reason
from dressage.spec.suite import Case
from worker.training.process.failures import RunFailure
from worker.training.process.seeds import derived_seed
from worker.training.rollout.rollout import Rollout, StopReason
from worker.training.rollout.template import ConversationTemplate

Generate = Callable[[list[list[int]], list[int], int], list[list[int]]]

OPEN_TRIES = 2


class Engine(Protocol):
    """Plays rollouts; what the trainer and the evaluation need of it."""

    def play(
        self,
        cases: Sequence[tuple[Case, int]],
        generate: Generate,
        end_ids: frozenset[int],
        seed: int,
    ) -> list[Rollout]:
        """Play one rollout for each (case, index in its group)."""

    def prompt_messages(self, case: Case) -> list[Message]:
        """The conversation a rollout of the case starts from."""


@dataclass(frozen=True)
class RolloutLimits:
    """What one rollout may use. Output in characters, timeout in seconds."""

    completion_tokens: int
    context_tokens: int
    tool_iterations: int
    tool_timeout: float
    tool_output: int


@dataclass(frozen=True)
class AgentParts:
    """What a rollout's conversation starts from."""

    instructions: str | None
    environment: str | None
    seed: int


class RolloutEngine:
    """Everything a rollout needs except the model."""

    def __init__(
        self,
        *,
        template: ConversationTemplate,
        agent: AgentParts,
        pool: WorkerPool,
        limits: RolloutLimits,
    ) -> None:
        self._template, self._agent = template, agent
        self._pool, self._limits = pool, limits
        self.longest_prompt = 0  # tokens, of all that was played, with what environments added

    def play(
        self,
        cases: Sequence[tuple[Case, int]],
        generate: Generate,
        end_ids: frozenset[int],
        seed: int,
    ) -> list[Rollout]:
        """Play one rollout for each (case, index in its group), all turn by turn together.

        Environments stay open for the measures; who scores the rollouts closes them.
        """
        rollouts = [self._opened(*pair) for pair in zip(cases, self._open(cases), strict=True)]
        self.longest_prompt = max(
            self.longest_prompt, *(len(rollout.prompt_ids) for rollout in rollouts)
        )
        for rollout in rollouts:
            if rollout.lost is not None:  # one masked token: a rollout is never empty
                rollout.stop_reason = StopReason.ENVIRONMENT_LOST
                rollout.append([min(end_ids)], [TokenRole.SCAFFOLD])
        live = [rollout for rollout in rollouts if rollout.stop_reason is None]
        turn = 0
        while live:
            prompts = [rollout.prompt_ids + rollout.completion_ids for rollout in live]
            room = [self._room(rollout) for rollout in live]
            written = generate(prompts, room, derived_seed(seed, turn))
            waiting = []
            for rollout, prefix, ids in zip(live, prompts, written, strict=True):
                calls = self._take_turn(rollout, prefix, ids, end_ids)
                if calls:
                    waiting.append((rollout, calls))
            self._run_tools(waiting)
            live = [rollout for rollout, _ in waiting if rollout.stop_reason is None]
            turn += 1
        return rollouts

    def prompt_messages(self, case: Case, added: str | None = None) -> list[Message]:
        """The agent's instructions and the case's input as a conversation.

        Args:
            case: The case.
            added: What its environment adds to the last user message.
        """
        return case.conversation(self._agent.instructions, added=added)

    def _open(self, cases: Sequence[tuple[Case, int]]) -> list[tuple[Worker | None, Outcome]]:
        """A fresh environment for each rollout, reset; one that fails is tried once more."""
        if self._agent.environment is None:
            return [(None, Outcome())] * len(cases)
        opened: list[tuple[Worker | None, Outcome]] = [(None, Outcome())] * len(cases)
        missing = list(range(len(cases)))
        for _ in range(OPEN_TRIES):
            workers = [self._pool.sandbox.start_worker() for _ in missing]
            calls = [
                (worker, self._open_request(cases[at][0]))
                for at, worker in zip(missing, workers, strict=True)
            ]
            outcomes = self._pool.run(calls, self._limits.tool_timeout)
            for at, worker, outcome in zip(missing, workers, outcomes, strict=True):
                if outcome.failure:
                    worker.kill()
                opened[at] = (worker, outcome)
            missing = [at for at in missing if opened[at][1].failure]
        return opened

    def _open_request(self, case: Case) -> dict[str, Any]:
        content = case.model_dump(mode="json", include={"input", "expect", "metadata"})
        return {
            "call": "open",
            "name": self._agent.environment,
            "case": {**content, "seed": derived_seed(self._agent.seed, "environment", case.id)},
            "max_output": self._limits.tool_output,
        }

    def _opened(
        self, pair: tuple[Case, int], environment: tuple[Worker | None, Outcome]
    ) -> Rollout:
        (case, index), (worker, outcome) = pair, environment
        messages = self.prompt_messages(case, outcome.value)
        prompt = self._template.prompt(messages)
        if len(prompt) >= self._limits.context_tokens:
            raise RunFailure(
                Reason.SUITE_INVALID,
                f"case {case.id!r}: its prompt has {len(prompt)} tokens, which leaves no room in "
                f"the model's context of {self._limits.context_tokens}",
            )
        return Rollout(
            case,
            index,
            messages,
            prompt,
            worker=worker,
            lost=f"reset: {outcome.message}" if outcome.failure else None,
        )

    def _take_turn(
        self, rollout: Rollout, prefix: list[int], ids: list[int], end_ids: frozenset[int]
    ) -> list[FunctionCall]:
        """Record what the model wrote and return its tool calls, if they are to be run."""
        rollout.append(ids, [TokenRole.ACTION] * len(ids))
        message = self._template.parse(ids, prefix)
        rollout.messages.append(message)
        calls = [call["function"] for call in message.get("tool_calls") or []]
        if not ids or ids[-1] not in end_ids:
            rollout.stop_reason = StopReason.MAX_COMPLETION_LENGTH
        elif not calls:
            rollout.stop_reason = StopReason.COMPLETED
        elif rollout.iterations == self._limits.tool_iterations:
            rollout.stop_reason = StopReason.MAX_TOOL_ITERATIONS
        return [] if rollout.stop_reason else calls

    def _run_tools(self, waiting: list[tuple[Rollout, list[FunctionCall]]]) -> None:
        """Run the calls of all rollouts side by side, then show each rollout its results."""
        results: dict[int, list[ToolCall]] = {id(rollout): [] for rollout, _ in waiting}
        for calls in self._rounds(waiting):
            for (rollout, _), result in zip(calls, self._results(calls), strict=True):
                results[id(rollout)].append(result)
        for rollout, _ in waiting:
            self._show(rollout, results[id(rollout)])

    def _rounds(
        self, waiting: list[tuple[Rollout, list[FunctionCall]]]
    ) -> Iterable[list[tuple[Rollout, FunctionCall]]]:
        """Calls that may run at the same time: an environment takes one after the other."""
        if self._agent.environment is None:
            yield [(rollout, call) for rollout, calls in waiting for call in calls]
            return
        for calls in zip_longest(*(calls for _, calls in waiting)):
            yield [
                (rollout, call)
                for (rollout, _), call in zip(waiting, calls, strict=True)
                if call is not None
            ]

    def _results(self, calls: list[tuple[Rollout, FunctionCall]]) -> list[ToolCall]:
        problems = [self._problem(call) for _, call in calls]
        requests: list[tuple[Worker | None, dict[str, Any]]] = [
            (
                rollout.worker,
                {
                    "call": "tool",
                    "name": call["name"],
                    "arguments": call["arguments"],
                    "max_output": self._limits.tool_output,
                },
            )
            for (rollout, call), problem in zip(calls, problems, strict=True)
            if not problem
        ]
        outcomes = iter(self._pool.run(requests, self._limits.tool_timeout))
        results = []
        for (rollout, call), problem in zip(calls, problems, strict=True):
            arguments = call["arguments"] if isinstance(call["arguments"], dict) else {}
            outcome = Outcome() if problem else next(outcomes)
            error = problem or (outcome.message if outcome.failure else None)
            results.append(ToolCall(call["name"], arguments, outcome.value, error))
            if rollout.worker and not rollout.worker.alive:
                rollout.lost = f"{call['name']}: {error}"
        return results

    def _show(self, rollout: Rollout, results: list[ToolCall]) -> None:
        """Append tool results to a rollout's messages and tokens."""
        rollout.tool_calls += results
        rollout.tool_failures += sum(result.error is not None for result in results)
        rollout.iterations += 1
        messages = [tool_message(result) for result in results]
        suffix = self._template.tool_suffix(messages)
        if rollout.lost is not None:
            rollout.messages += messages
            rollout.stop_reason = StopReason.ENVIRONMENT_LOST
        # A result that leaves no room for an answer is not shown: the rollout ends before it.
        elif len(suffix.ids) >= self._room(rollout):
            rollout.stop_reason = StopReason.MAX_COMPLETION_LENGTH
        else:
            rollout.messages += messages
            rollout.append_results(suffix, [result.name for result in results])

    def _room(self, rollout: Rollout) -> int:
        """Tokens that a rollout may still add: of its budget, and of the model's context."""
        budget = self._limits.completion_tokens - len(rollout.completion_ids)
        used = len(rollout.prompt_ids) + len(rollout.completion_ids)
        return min(budget, self._limits.context_tokens - used)

    def _problem(self, call: FunctionCall) -> str | None:
        if call["name"] not in self._template.tool_names:
            have = ", ".join(sorted(self._template.tool_names))
            return f"there is no tool {call['name']!r}; the tools are: {have}"
        if not isinstance(call["arguments"], dict):
            return "the arguments must be a JSON object"
        return None


def tool_message(result: ToolCall) -> Message:
    """What the model is shown of a call."""
    content = (
        str(result.result)
        if result.error is None
        else json.dumps({"error": result.error}, ensure_ascii=False)
    )
    content = content.encode("utf-8", "replace").decode()  # tokenizers refuse the rest
    return {"role": "tool", "name": result.name, "content": content}
