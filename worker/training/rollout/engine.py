"""Plays rollouts, each in a coroutine of its own: sample, run the tools, show, repeat."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dressage.authoring.measure import ToolCall
from dressage.sandbox.pool import WorkerPool
from dressage.sandbox.process import Failure, Outcome, SandboxStartError, Worker
from dressage.seeds import derived_seed
from dressage.spec.chat import FunctionCall, Message
from dressage.spec.event import TokenRole
from dressage.spec.suite import Case
from worker.training.rollout.rollout import Rollout, StopReason
from worker.training.rollout.template import TOO_DEEP, ConversationTemplate
from worker.training.sampler.protocol import Draws, Sampled, Sampler

OPEN_TRIES = 2
PROMPTS_KEPT = 1024
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MAX_NAME = 200  # of a tool that a model has made up


class Engine(Protocol):
    """Plays rollouts; what the trainer and the evaluation need of it."""

    def tell(self, on_turn: Callable[[], None]) -> None:
        """Have this called after each turn of a rollout."""

    def start(
        self, cases: Sequence[tuple[Case, int]], sampler: Sampler, draws: Draws
    ) -> list[Awaitable[Rollout]]:
        """Begin one rollout for each (case, index in its group); each must be awaited.

        Environments stay open for the measures; who scores the rollouts closes them.
        """

    def prompt_messages(self, case: Case) -> list[Message]:
        """The conversation a rollout of the case starts from."""


@dataclass(frozen=True)
class RolloutLimits:
    """What one rollout may use. Output in characters, timeout in seconds.

    Attributes:
        completion_tokens: Of everything after the prompt.
        context_tokens: Of prompt and completion.
        tool_iterations: Times it may return to the model.
        tool_timeout: Of one call.
        tool_output: Of one result.
        turn_tokens: Of one turn; None: as many as the completion may have.
    """

    completion_tokens: int
    context_tokens: int
    tool_iterations: int
    tool_timeout: float
    tool_output: int
    turn_tokens: int | None = None


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
        self._on_turn: Callable[[], None] = quiet
        self._prompts: dict[str, list[int]] = {}
        self.longest_prompt = 0  # tokens, of all that was played, with what environments added

    def start(
        self, cases: Sequence[tuple[Case, int]], sampler: Sampler, draws: Draws
    ) -> list[Awaitable[Rollout]]:
        """As for `Engine`: nobody waits for the slowest of a turn."""
        sampler.join(len(cases))
        return [self._play(case, index, sampler, draws) for case, index in cases]

    def play(
        self, cases: Sequence[tuple[Case, int]], sampler: Sampler, draws: Draws
    ) -> list[Rollout]:
        """Play one rollout for each (case, index in its group), and wait for all."""

        async def together() -> list[Rollout]:
            return await asyncio.gather(*self.start(cases, sampler, draws))

        return asyncio.run(together())

    def tell(self, on_turn: Callable[[], None]) -> None:
        """As for `Engine`."""
        self._on_turn = on_turn

    async def _play(self, case: Case, index: int, sampler: Sampler, draws: Draws) -> Rollout:
        try:
            rollout = await self._opened(case, index)
            self.longest_prompt = max(self.longest_prompt, len(rollout.prompt_ids))
            if rollout.lost is not None:  # one masked token: a rollout is never empty
                rollout.stop_reason = StopReason.ENVIRONMENT_LOST
                rollout.append([min(sampler.end_ids)], [TokenRole.SCAFFOLD])
            while rollout.stop_reason is None:
                prefix = rollout.prompt_ids + rollout.completion_ids
                room = min(self._room(rollout), self._limits.turn_tokens or self._room(rollout))
                turn = draws.turn(prefix, room, case.id, index, rollout.iterations)
                sampled = await sampler.sample(turn)
                calls = self._take_turn(rollout, prefix, sampled, sampler.end_ids)
                if calls:
                    self._show(rollout, await self._results(rollout, calls))
                self._on_turn()
            return rollout
        finally:
            sampler.leave()

    def prompt_messages(self, case: Case, added: str | None = None) -> list[Message]:
        """The agent's instructions and the case's input as a conversation.

        Args:
            case: The case.
            added: What its environment adds to the last user message.
        """
        return case.conversation(self._agent.instructions, added=added)

    async def _open(self, case: Case) -> tuple[Worker | None, Outcome]:
        """A fresh environment, reset; one that fails is tried once more."""
        if self._agent.environment is None:
            return None, Outcome()
        worker, outcome = None, Outcome(failure=Failure.CRASHED)
        for _ in range(OPEN_TRIES):
            try:
                worker = await self._pool.start_worker()
            except SandboxStartError as error:
                outcome = Outcome(failure=Failure.CRASHED, message=str(error))
                continue
            request = self._open_request(case)
            outcome = await self._pool.call(worker, request, self._limits.tool_timeout)
            if not outcome.failure:
                break
            worker.kill()
        return worker, outcome

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

    async def _opened(self, case: Case, index: int) -> Rollout:
        worker, outcome = await self._open(case)
        messages = self.prompt_messages(case, outcome.value)
        prompt = self._prompt(messages)
        lost = f"reset: {outcome.message}" if outcome.failure else None
        if len(prompt) >= self._limits.context_tokens:  # with what its environment has added
            lost = (
                f"the prompt has {len(prompt)} tokens, which leaves no room in the model's context "
                f"of {self._limits.context_tokens}"
            )
            prompt = prompt[: self._limits.context_tokens - 1]
        return Rollout(case, index, messages, prompt, worker=worker, lost=lost)

    def _prompt(self, messages: list[Message]) -> list[int]:
        """Its token ids: made once for all members of a group."""
        key = json.dumps(messages)
        if key not in self._prompts:
            if len(self._prompts) == PROMPTS_KEPT:
                self._prompts.clear()
            self._prompts[key] = self._template.prompt(messages)
        return list(self._prompts[key])

    def _take_turn(
        self, rollout: Rollout, prefix: list[int], sampled: Sampled, end_ids: frozenset[int]
    ) -> list[FunctionCall]:
        """Record what the model wrote and return its tool calls, if they are to be run."""
        ids = sampled.ids
        rollout.append_action(sampled)
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

    async def _results(self, rollout: Rollout, calls: list[FunctionCall]) -> list[ToolCall]:
        """Run the calls of one turn: side by side, or one after the other in an environment."""
        numbered = enumerate(calls, 1)
        if rollout.worker is None:
            running = [self._result(rollout, call, number) for number, call in numbered]
            return list(await asyncio.gather(*running))
        return [await self._result(rollout, call, number) for number, call in numbered]

    async def _result(self, rollout: Rollout, call: FunctionCall, number: int) -> ToolCall:
        problem = self._problem(call)
        outcome = Outcome()
        if not problem:
            request = self._request(rollout, call, number)
            outcome = await self._pool.call(rollout.worker, request, self._limits.tool_timeout)
        arguments = call["arguments"] if isinstance(call["arguments"], dict) else {}
        error = problem or (outcome.message if outcome.failure else None)
        if rollout.worker and not rollout.worker.alive:
            rollout.lost = f"{call['name']}: {error}"
        return ToolCall(str(call["name"])[:MAX_NAME], arguments, outcome.value, error)

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


def quiet() -> None:
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
