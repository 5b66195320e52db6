"""Custom rollouts, in TRL's words: prompts in, token ids with a mask out."""

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from dressage.authoring.errors import MeasureDefinitionError, MeasureTypeError
from dressage.spec.chat import Message


class PolicyModel(Protocol):
    """The model that is trained, as a rollout function sees it."""

    def encode(self, messages: list[Message]) -> list[int]:
        """Token ids of a conversation up to the header of the assistant's turn."""

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
    function: Callable[[list[Any], PolicyModel], dict[str, Any] | Awaitable[dict[str, Any]]]

    async def play(self, prompts: list[Any], model: PolicyModel) -> dict[str, Any]:
        """Run it and check the shape of what it gives back.

        Raises:
            MeasureTypeError: Keys or lengths are wrong.
        """
        result = self.function(prompts, model)
        if inspect.isawaitable(result):
            result = await result
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
        return {
            "prompt_ids": result["prompt_ids"],
            "completion_ids": result["completion_ids"],
            "env_mask": masks or [[1] * len(ids) for ids in result["completion_ids"]],
            "messages": result.get("messages"),
        }


def rollout_func(function: Callable[..., Any]) -> RolloutFunction:
    """Register `f(prompts, model)`; it may be async.

    It returns `prompt_ids` and `completion_ids`, a list of token ids for each prompt; `env_mask`
    (1: the model wrote the token, 0: the environment did; ECHO predicts the latter); and, for the
    measures, optionally `messages`, the conversation that followed each prompt.

    Raises:
        MeasureDefinitionError: It does not take two arguments.
    """
    name = getattr(function, "__name__", repr(function))
    if len(inspect.signature(function).parameters) != 2:
        raise MeasureDefinitionError(
            f"rollout_func {name!r} must take two arguments: prompts, model"
        )
    return RolloutFunction(name, function)
