"""Rollouts that the suite's own code plays: TRL's `rollout_func`, in the sandbox."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dressage.sandbox.pool import WorkerPool
from dressage.spec.chat import Message
from dressage.spec.event import TokenRole
from dressage.spec.status import Reason
from dressage.spec.suite import Case
from worker.training.process.failures import RunFailure
from worker.training.process.seeds import derived_seed
from worker.training.rollout.engine import Generate
from worker.training.rollout.rollout import Rollout, StopReason
from worker.training.rollout.template import ConversationTemplate


@dataclass(frozen=True)
class FunctionRollouts:
    """Plays rollouts like `RolloutEngine`, by one call of a rollout function.

    Attributes:
        name: Of the rollout function.
        template: Encodes what the function says.
        instructions: The agent's.
        pool: Where the function runs.
        completion_tokens: Longest continuation, and longest completion.
        timeout: Seconds the function may take between two questions.
    """

    name: str
    template: ConversationTemplate
    instructions: str | None
    pool: WorkerPool
    completion_tokens: int
    timeout: float

    def play(
        self,
        cases: Sequence[tuple[Case, int]],
        generate: Generate,
        end_ids: frozenset[int],
        seed: int,
    ) -> list[Rollout]:
        """Play one rollout for each (case, index in its group).

        Raises:
            RunFailure: The function failed, or what it returned is unusable.
        """
        prompts = [self.prompt_messages(case) for case, _ in cases]
        asked = _Answers(self.template, generate, self.completion_tokens, seed)
        worker = self.pool.sandbox.start_worker()
        request = {"call": "rollout_func", "name": self.name, "prompts": prompts}
        outcome = worker.call(request, self.timeout, asked)
        worker.kill()
        if outcome.failure:
            raise self._failed(outcome.message)
        value = outcome.value
        said = value["messages"] or [None] * len(prompts)
        return [
            self._rollout(case, index, prompt, prompt_ids, ids, mask, messages, end_ids)
            for (case, index), prompt, prompt_ids, ids, mask, messages in zip(
                cases,
                prompts,
                value["prompt_ids"],
                value["completion_ids"],
                value["env_mask"],
                said,
                strict=True,
            )
        ]

    def prompt_messages(self, case: Case) -> list[Message]:
        """The agent's instructions and the case's input as a conversation."""
        return case.conversation(self.instructions)

    def _rollout(
        self,
        case: Case,
        index: int,
        prompt: list[Message],
        prompt_ids: list[int],
        ids: list[int],
        mask: list[int],
        messages: list[Message] | None,
        end_ids: frozenset[int],
    ) -> Rollout:
        vocabulary = len(self.template.tokenizer)
        if not prompt_ids or not ids:
            raise self._failed(f"an empty prompt or completion for case {case.id!r}")
        if any(not isinstance(i, int) or not 0 <= i < vocabulary for i in [*prompt_ids, *ids]):
            raise self._failed(f"something that is no token id for case {case.id!r}")
        if messages is None:
            last = next((at for at in reversed(range(len(ids))) if not mask[at]), -1)
            text = self.template.tokenizer.decode(ids[last + 1 :], skip_special_tokens=True)
            messages = [{"role": "assistant", "content": text}]
        cut = len(ids) > self.completion_tokens
        ids, mask = ids[: self.completion_tokens], mask[: self.completion_tokens]
        ended = not cut and ids[-1] in end_ids
        return Rollout(
            case,
            index,
            [*prompt, *messages],
            list(prompt_ids),
            list(ids),
            [TokenRole.ACTION if wrote else TokenRole.OBSERVATION for wrote in mask],
            [None] * len(ids),
            stop_reason=StopReason.COMPLETED if ended else StopReason.MAX_COMPLETION_LENGTH,
        )

    def _failed(self, message: str) -> RunFailure:
        return RunFailure(Reason.USER_CODE_ERROR, f"rollout_func {self.name!r}: {message}")


class _Answers:
    """What a rollout function may ask of the model."""

    def __init__(
        self, template: ConversationTemplate, generate: Generate, longest: int, seed: int
    ) -> None:
        self._template, self._generate = template, generate
        self._longest, self._seed, self._turn = longest, seed, 0

    def __call__(self, question: dict[str, Any]) -> Any:
        tokenizer = self._template.tokenizer
        if question["ask"] == "encode":
            return self._template.prompt(question["messages"])
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
        return self._generate(prompts, [limit] * len(prompts), seed)
