"""Plays rollouts: generate, run the tools of all rollouts at once, repeat."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Protocol

from dressage.authoring.measure import ToolCall
from dressage.sandbox.pool import WorkerPool
from dressage.sandbox.process import Outcome, Worker
from dressage.seeds import derived_seed
from dressage.spec.chat import FunctionCall, Message
from dressage.spec.event import TokenRole
from dressage.spec.suite import Case
from worker.training.rollout.rollout import Rollout, StopReason
from worker.training.rollout.template import TOO_DEEP, ConversationTemplate

Generate = Callable[[list[list[int]], list[int], int], list[list[int]]]

OPEN_TRIES = 2
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MAX_NAME = 200  # of a tool that a model has made up


class Engine(Protocol):
    """Plays rollouts; what the trainer and the evaluation need of it."""

    def tell(self, on_turn: Callable[[int, int], None]) -> None:
        """Have this called after each turn: rollouts of the batch that are played, of how many."""

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
        self._on_turn: Callable[[int, int], None] = quiet
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
            self._on_turn(len(rollouts) - len(live), len(rollouts))
        return rollouts

    def tell(self, on_turn: Callable[[int, int], None]) -> None:
        """As for `Engine`."""
        self._on_turn = on_turn

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
        seed = derived_seed(self._agent.seed, "environment", case.id)
        return {
            "call": "open",
            "name": self._agent.environment,
            "seed": seed,
            "case": {**content, "seed": seed},
            "max_output": self._limits.tool_output,
        }

    def _opened(
        self, pair: tuple[Case, int], environment: tuple[Worker | None, Outcome]
    ) -> Rollout:
        (case, index), (worker, outcome) = pair, environment
        messages = self.prompt_messages(case, outcome.value)
        prompt = self._template.prompt(messages)
        lost = f"reset: {outcome.message}" if outcome.failure else None
        if len(prompt) >= self._limits.context_tokens:  # with what its environment has added
            lost = (
                f"the prompt has {len(prompt)} tokens, which leaves no room in the model's context "
                f"of {self._limits.context_tokens}"
            )
            prompt = prompt[: self._limits.context_tokens - 1]
        return Rollout(case, index, messages, prompt, worker=worker, lost=lost)

    def _take_turn(
        self, rollout: Rollout, prefix: list[int], ids: list[int], end_ids: frozenset[int]
    ) -> list[FunctionCall]:
        """Record what the model wrote and return its tool calls, if they are to be run."""
        rollout.append(ids, [TokenRole.ACTION] * len(ids))
        message = self._template.parse(ids, prefix)
        requested = message.get("tool_calls") or []
        if len(requested) > 1 and self._template.one_call_a_turn:
            # A conversation that the template cannot show is not played: no server could.
            message["tool_calls"] = requested[:1]
            rollout.tool_failures += len(requested) - 1
            rollout.tool_calls += [_untaken(call["function"]) for call in requested[1:]]
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
        counted: Counter[int] = Counter()  # calls of each rollout so far
        requests = []
        for (rollout, call), problem in zip(calls, problems, strict=True):
            counted[id(rollout)] += 1
            if not problem:
                request = self._request(rollout, call, counted[id(rollout)])
                requests.append((rollout.worker, request))
        outcomes = iter(self._pool.run(requests, self._limits.tool_timeout))
        results = []
        for (rollout, call), problem in zip(calls, problems, strict=True):
            arguments = call["arguments"] if isinstance(call["arguments"], dict) else {}
            outcome = Outcome() if problem else next(outcomes)
            error = problem or (outcome.message if outcome.failure else None)
            name = str(call["name"])[:MAX_NAME]
            results.append(ToolCall(name, arguments, outcome.value, error))
            if rollout.worker and not rollout.worker.alive:
                rollout.lost = f"{call['name']}: {error}"
        return results

    def _request(self, rollout: Rollout, call: FunctionCall, number: int) -> dict[str, Any]:
        request: dict[str, Any] = {
            "call": "tool",
            "name": call["name"],
            "arguments": call["arguments"],
            "max_output": self._limits.tool_output,
        }
        if rollout.worker is None:  # an environment's draws go on from its reset
            parts = ("tool", call["name"], rollout.case.id, rollout.iterations, number)
            request["seed"] = derived_seed(self._agent.seed, *parts)
        return request

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
            rollout.unshown_results += len(results)
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
        if call["arguments"] == TOO_DEEP:
            return f"the arguments are nested too deeply: {TOO_DEEP}"
        if not isinstance(call["arguments"], dict):
            return "the arguments must be a JSON object"
        return None


def quiet(_done: int, _all: int) -> None:
    """Nobody wants to know how far it is."""


def _untaken(call: FunctionCall) -> ToolCall:
    """A call beyond the one that the template can show."""
    arguments = call["arguments"] if isinstance(call["arguments"], dict) else {}
    why = "not run: the model's chat template shows one call in a message"
    return ToolCall(call["name"], arguments, None, why)


def tool_message(result: ToolCall) -> Message:
    """What the model is shown of a call."""
    content = (
        str(result.result)
        if result.error is None
        else json.dumps({"error": result.error}, ensure_ascii=False)
    )
    content = content.encode("utf-8", "replace").decode()  # tokenizers refuse the rest
    # A name that the model has made up may hold markup, or nothing: templates write it out.
    name = result.name if TOOL_NAME.fullmatch(result.name) else "unknown"
    return {"role": "tool", "name": name, "content": content}
