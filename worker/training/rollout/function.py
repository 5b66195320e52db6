"""Rollouts that the suite's own code plays: TRL's `rollout_func`, in the sandbox."""

import logging
from collections.abc import Callable, Sequence
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
from worker.training.rollout.engine import Generate, quiet
from worker.training.rollout.rollout import Rollout, StopReason
from worker.training.rollout.template import ConversationTemplate

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
    on_turn: Callable[[int, int], None] = field(default=quiet)

    def play(
        self,
        cases: Sequence[tuple[Case, int]],
        generate: Generate,
        end_ids: frozenset[int],
        seed: int,
    ) -> list[Rollout]:
        """Play one rollout for each (case, index in its group).

        Raises:
            RunFailure: What the function returned is unusable.
        """
        prompts = [self.prompt_messages(case) for case, _ in cases]
        asked = _Answers(self, generate, seed, end_ids)
        request = {
            "call": "rollout_func",
            "name": self.name,
            "prompts": prompts,
            "cases": [self._case(*pair) for pair in cases],
            "seed": seed,
        }
        for _ in range(TRIES):
            worker = self.pool.sandbox.start_worker()
            outcome = worker.call(request, self.timeout, asked)
            worker.kill()
            if outcome.failure is Failure.WRONG_TYPE:
                raise self._failed(outcome.message)
            if not outcome.failure:
                break
            log.warning("rollout_func %r: %s", self.name, outcome.message)
        if outcome.failure:  # a busy simulator: these groups are dropped, and counted
            why = f"rollout_func {self.name!r}: {outcome.message}"
            return [self._lost(*pair, why, end_ids) for pair in cases]
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

    def tell(self, on_turn: Callable[[int, int], None]) -> None:
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
        return Rollout(
            case,
            index,
            [*prompt, *messages],
            prompt_ids,
            ids,
            [TokenRole.ACTION if wrote else TokenRole.OBSERVATION for wrote in mask],
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
        generate: Generate,
        seed: int,
        end_ids: frozenset[int],
    ) -> None:
        self._template, self._generate, self._ends = rollouts.template, generate, end_ids
        self._longest, self._seed, self._turn = rollouts.completion_tokens, seed, 0
        self._on_turn = rollouts.on_turn
        self._cut: set[tuple[int, ...]] = set()

    def was_cut(self, ids: list[int]) -> bool:
        """Whether these tokens end where a continuation was cut."""
        return any(tuple(ids[-len(tail) :]) == tail for tail in self._cut)

    def __call__(self, question: dict[str, Any]) -> Any:
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
        seed = derived_seed(self._seed, self._turn)
        written = self._generate(prompts, [limit] * len(prompts), seed)
        self._on_turn(0, len(prompts))
        self._cut |= {tuple(ids[-TAIL:]) for ids in written if ids and ids[-1] not in self._ends}
        return written


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
