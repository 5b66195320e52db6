"""Rollouts that the suite's own code plays: TRL's `rollout_func`, in the sandbox."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dressage.authoring.measure import ToolCall
from dressage.sandbox.pool import WorkerPool
from dressage.sandbox.process import Failure
from dressage.seeds import derived_seed
from dressage.spec.chat import Message
from dressage.spec.event import TokenRole
from dressage.spec.status import Reason
from dressage.spec.suite import Case
from worker.training.process.failures import RunFailure
from worker.training.rollout.engine import quiet
from worker.training.rollout.rollout import Rollout, StopReason
from worker.training.rollout.template import ConversationTemplate
from worker.training.sampler.protocol import Draws, Sampled, Sampler, sample_all

log = logging.getLogger(__name__)

TRIES = 2
TAIL = 8  # tokens by which the end of a continuation is known again


@dataclass
class FunctionRollouts:
    """Plays rollouts like `RolloutEngine`, by one call of a rollout function.

    Attributes:
        name: Of the rollout function.
        template: Encodes what the function says.
        instructions: The agent's.
        pool: Where the function runs.
        completion_tokens: Longest continuation, and longest completion.
        timeout: Seconds the function may take between two questions.
        needs_mask: Whether it must say which tokens the environment wrote.
        seed: The job's.
        on_turn: Told of each turn.
    """

    name: str
    template: ConversationTemplate
    instructions: str | None
    pool: WorkerPool
    completion_tokens: int
    timeout: float
    needs_mask: bool = False
    seed: int = 0
    on_turn: Callable[[], None] = field(default=quiet)

    def start(
        self, cases: Sequence[tuple[Case, int]], sampler: Sampler, draws: Draws
    ) -> list[Awaitable[Rollout]]:
        """As for `Engine`; one call of the function plays all of them.

        Raises:
            RunFailure: What the function returned is unusable (when it is awaited).
        """
        playing: asyncio.Task[list[Rollout]] | None = None

        async def one(at: int) -> Rollout:
            nonlocal playing
            if playing is None:
                playing = asyncio.create_task(self._play(cases, sampler, draws))
            return (await playing)[at]

        return [one(at) for at in range(len(cases))]

    async def _play(
        self, cases: Sequence[tuple[Case, int]], sampler: Sampler, draws: Draws
    ) -> list[Rollout]:
        prompts = [self.prompt_messages(case) for case, _ in cases]
        asked = _Answers(self, sampler, draws, asyncio.get_running_loop())
        request = {
            "call": "rollout_func",
            "name": self.name,
            "prompts": prompts,
            "cases": [self._case(*pair) for pair in cases],
            "seed": draws.seed,
        }
        for _ in range(TRIES):
            worker = await self.pool.start_worker()
            outcome = await self.pool.call(worker, request, self.timeout, questions=asked)
            worker.kill()
            if outcome.failure is Failure.WRONG_TYPE:
                raise self._failed(outcome.message)
            if not outcome.failure:
                break
            log.warning("rollout_func %r: %s", self.name, outcome.message)
        if outcome.failure:  # a busy simulator: these groups are dropped, and counted
            why = f"rollout_func {self.name!r}: {outcome.message}"
            return [self._lost(*pair, why, sampler.end_ids) for pair in cases]
        value = outcome.value
        if self.needs_mask and value["env_mask"] is None:
            raise self._failed(
                "ECHO learns what the environment wrote: return env_mask (1: the model wrote the "
                "token, 0: the environment did), or leave training.echo out"
            )
        return [
            self._rollout(pair, at, prompt, value, asked)
            for at, (pair, prompt) in enumerate(zip(cases, prompts, strict=True))
        ]

    def tell(self, on_turn: Callable[[], None]) -> None:
        """As for `Engine`."""
        self.on_turn = on_turn

    def prompt_messages(self, case: Case) -> list[Message]:
        """The agent's instructions and the case's input as a conversation."""
        return case.conversation(self.instructions)

    def _case(self, case: Case, index: int) -> dict[str, Any]:
        """What the function may know of a case."""
        return {
            **case.model_dump(mode="json"),
            "index": index,
            "seed": derived_seed(self.seed, "environment", case.id),
        }

    def _lost(self, case: Case, index: int, why: str, end_ids: frozenset[int]) -> Rollout:
        messages = self.prompt_messages(case)
        rollout = Rollout(case, index, messages, self.template.prompt(messages), lost=why)
        rollout.stop_reason = StopReason.ENVIRONMENT_LOST
        rollout.append([min(end_ids)], [TokenRole.SCAFFOLD])  # a rollout is never empty
        return rollout

    def _rollout(
        self,
        pair: tuple[Case, int],
        at: int,
        prompt: list[Message],
        value: dict[str, Any],
        asked: "_Answers",
    ) -> Rollout:
        case, index = pair
        vocabulary = len(self.template.tokenizer)
        prompt_ids, ids = list(value["prompt_ids"][at]), list(value["completion_ids"][at])
        mask = list(value["env_mask"][at]) if value["env_mask"] else [1] * len(ids)
        if not prompt_ids or not ids:
            raise self._failed(f"an empty prompt or completion for case {case.id!r}")
        if any(not isinstance(i, int) or not 0 <= i < vocabulary for i in [*prompt_ids, *ids]):
            raise self._failed(f"something that is no token id for case {case.id!r}")
        messages = value["messages"][at] if value["messages"] else None
        if messages is None:
            last = next((n for n in reversed(range(len(ids))) if not mask[n]), -1)
            text = self.template.tokenizer.decode(ids[last + 1 :], skip_special_tokens=True)
            messages = [{"role": "assistant", "content": text}]
        cut = len(ids) > self.completion_tokens or asked.was_cut(ids)
        said = value["stop_reason"][at] if value["stop_reason"] else None
        ids, mask = ids[: self.completion_tokens], mask[: self.completion_tokens]
        logps, versions = asked.drawn(prompt_ids, ids)
        return Rollout(
            case,
            index,
            [*prompt, *messages],
            prompt_ids,
            ids,
            [TokenRole.ACTION if wrote else TokenRole.OBSERVATION for wrote in mask],
            logps,
            versions,
            [None] * len(ids),
            stop_reason=self._stop_reason(said, cut=cut),
            tool_calls=_calls_in(messages),
            extra={name: entries[at] for name, entries in value["extra"].items()},
            prompt_length=len(prompt),
        )

    def _stop_reason(self, said: Any, *, cut: bool) -> StopReason:
        """Cut if it is cut; else what the function says, and completed if it says nothing."""
        if cut:
            return StopReason.MAX_COMPLETION_LENGTH
        if said is None:
            return StopReason.COMPLETED
        if said not in list(StopReason):
            raise self._failed(f"stop_reason {said!r} is none of {', '.join(StopReason)}")
        return StopReason(said)

    def _failed(self, message: str) -> RunFailure:
        return RunFailure(Reason.USER_CODE_ERROR, f"rollout_func {self.name!r}: {message}")


class _Answers:
    """What a rollout function may ask of the model."""

    def __init__(
        self,
        rollouts: FunctionRollouts,
        sampler: Sampler,
        draws: Draws,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._template, self._sampler, self._draws = rollouts.template, sampler, draws
        self._longest, self._turn, self._loop = rollouts.completion_tokens, 0, loop
        self._on_turn = rollouts.on_turn
        self._cut: set[tuple[int, ...]] = set()
        self._written: dict[tuple[int, ...], list[Sampled]] = {}  # by their prompts

    def was_cut(self, ids: list[int]) -> bool:
        """Whether these tokens end where a continuation was cut."""
        return any(tuple(ids[-len(tail) :]) == tail for tail in self._cut)

    def drawn(self, prompt: list[int], ids: list[int]) -> tuple[list[float], list[int]]:
        """Log-probabilities and versions of those tokens that are continuations of ours."""
        logps, versions = [math.nan] * len(ids), [-1] * len(ids)
        at = 0
        while at < len(ids):
            found = self._written.get((*prompt, *ids[:at]), [])
            same = next((one for one in found if one.ids == ids[at : at + len(one.ids)]), None)
            if same is None or not same.ids:
                at += 1
                continue
            end = at + len(same.ids)
            logps[at:end], versions[at:end] = same.logps, same.versions
            at = end
        return logps, versions

    def __call__(self, question: dict[str, Any]) -> Any:
        """Answer a question; called in a thread of the pool."""
        tokenizer = self._template.tokenizer
        if question["ask"] == "encode":
            return self._template.prompt(question["messages"], tools=question["tools"])
        if question["ask"] == "encode_text":
            return tokenizer(question["text"], add_special_tokens=False)["input_ids"]
        if question["ask"] == "decode":
            return tokenizer.decode(question["ids"], skip_special_tokens=True)
        prompts = question["prompts"]
        if not prompts:
            return []
        limit = min(question["max_tokens"] or self._longest, self._longest)
        self._turn += 1
        turns = [
            self._draws.turn(prompt, limit, self._turn, at) for at, prompt in enumerate(prompts)
        ]
        asking = asyncio.run_coroutine_threadsafe(sample_all(self._sampler, turns), self._loop)
        written = asking.result()
        self._on_turn()
        for turn, one in zip(turns, written, strict=True):
            self._written.setdefault(tuple(turn.prompt), []).append(one)
            if one.ids and one.ids[-1] not in self._sampler.end_ids:
                self._cut.add(tuple(one.ids[-TAIL:]))
        return [one.ids for one in written]


def _calls_in(messages: list[Message]) -> list[ToolCall]:
    """Calls and results as the function's messages tell them."""
    results = [message for message in messages if message["role"] == "tool"]
    found = []
    for message in messages:
        for call in message.get("tool_calls") or []:
            name, arguments = call["function"]["name"], call["function"].get("arguments")
            answer = next(
                (
                    result
                    for result in results
                    if result.get("tool_call_id") == call.get("id")
                    and result.get("name", name) == name
                ),
                None,
            )
            if answer:
                results.remove(answer)
            said = str(answer.get("content") or "") if answer else None
            found.append(
                ToolCall(name, arguments if isinstance(arguments, dict) else {}, said, None)
            )
    return found
