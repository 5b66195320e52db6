"""Custom rollouts, in TRL's words: prompts in, token ids with a mask out."""

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from dressage.authoring.errors import MeasureDefinitionError, MeasureTypeError
from dressage.spec.chat import Message

KNOWN = ("prompt_ids", "completion_ids", "env_mask", "messages", "stop_reason", "logprobs")


class PolicyModel(Protocol):
    """The model that is trained, as a rollout function sees it."""

    def encode(
        self, messages: list[Message], tools: list[dict[str, Any]] | None = None
    ) -> list[int]:
        """Token ids of a conversation, with tools if any, up to the assistant's turn."""

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a plain text."""

    def decode(self, ids: list[int]) -> str:
        """The text of token ids, control tokens left out."""

    def generate(self, prompts: list[list[int]], max_tokens: int | None = None) -> list[list[int]]:
        """Continue every prompt at the job's temperature, end token included."""


@dataclass(frozen=True)
class RolloutFunction:
    """A function registered as a rollout function, known by its name."""

    name: str
    function: Callable[..., dict[str, Any] | Awaitable[dict[str, Any]]]

    @property
    def takes_cases(self) -> bool:
        """Whether it wants the cases beside the prompts."""
        return len(inspect.signature(self.function).parameters) == 3

    def checked(self, result: Any, prompts: list[Any]) -> dict[str, Any]:
        """What the function gave back, if its shape is right.

        Raises:
            MeasureTypeError: Keys or lengths are wrong.
        """
        if not isinstance(result, dict):
            raise MeasureTypeError(f"rollout_func {self.name!r} must return a dictionary")
        for key in ("prompt_ids", "completion_ids"):
            if len(result.get(key) or ()) != len(prompts):
                raise MeasureTypeError(
                    f"rollout_func {self.name!r}: {key} must have one list for each of the "
                    f"{len(prompts)} prompts"
                )
        masks = result.get("env_mask")
        if masks is not None and [*map(len, masks)] != [*map(len, result["completion_ids"])]:
            raise MeasureTypeError(
                f"rollout_func {self.name!r}: env_mask must have a number for each completion token"
            )
        names = set(result) - {*KNOWN}
        for name in sorted(names | {"messages", "stop_reason"}):
            entries = result.get(name)
            if entries is None and name not in names:
                continue
            if not isinstance(entries, list | tuple) or len(entries) != len(prompts):
                raise MeasureTypeError(
                    f"rollout_func {self.name!r}: {name} must have an entry for each of the "
                    f"{len(prompts)} prompts"
                )
        return {
            "prompt_ids": result["prompt_ids"],
            "completion_ids": result["completion_ids"],
            "env_mask": masks,
            "messages": result.get("messages"),
            "stop_reason": result.get("stop_reason"),
            "extra": {name: list(result[name]) for name in sorted(names)},
        }


def rollout_func(function: Callable[..., Any]) -> RolloutFunction:
    """Register `f(prompts, model)` or `f(prompts, model, cases)`; it may be async.

    A case is a dictionary: `id`, `input`, `expect`, `metadata`, `index` in its group, and a `seed`
    that is the same in a group.

    It returns `prompt_ids` and `completion_ids`, a list of token ids for each prompt; `env_mask`
    (1: the model wrote the token, 0: the environment did; ECHO predicts the latter); and
    optionally, an entry for each prompt, `messages` (the conversation that followed),
    `stop_reason`, and whatever else measures (`context.extra`) and reward functions shall get.

    Raises:
        MeasureDefinitionError: It does not take two or three arguments.
    """
    name = getattr(function, "__name__", repr(function))
    if len(inspect.signature(function).parameters) not in (2, 3):
        raise MeasureDefinitionError(
            f"rollout_func {name!r} must take prompts and model, and may take cases"
        )
    return RolloutFunction(name, function)
