"""Reward functions as TRL has them: all completions of a step in, one number for each out."""

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from dressage.authoring.errors import MeasureDefinitionError, MeasureTypeError, ScoreRangeError


@dataclass(frozen=True)
class RewardFunction:
    """A function registered as a reward function, known by its name."""

    name: str
    function: Callable[..., list[float | None] | Awaitable[list[float | None]]]

    def __call__(self, *args: Any, **columns: Any) -> Any:
        """Call the author's function as if it were not decorated."""
        return self.function(*args, **columns)

    async def evaluate(
        self, prompts: list[Any], completions: list[Any], columns: dict[str, list[Any]]
    ) -> list[float | None]:
        """Run it and check what it gives back: a finite number, or None, for each completion.

        Raises:
            MeasureTypeError: It is no list of numbers of the right length.
            ScoreRangeError: A number is infinite or not a number.
        """
        result = self.function(prompts=prompts, completions=completions, **columns)
        if inspect.isawaitable(result):
            result = await result
        if not isinstance(result, list | tuple) or len(result) != len(completions):
            raise MeasureTypeError(
                f"reward function {self.name!r} must return one number for each of the "
                f"{len(completions)} completions"
            )
        return [self._checked(value) for value in result]

    def _checked(self, value: Any) -> float | None:
        if value is None:
            return None
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise MeasureTypeError(
                f"reward function {self.name!r} returned {type(value).__name__}, not a number"
            ) from None
        if not abs(number) < float("inf"):
            raise ScoreRangeError(f"reward function {self.name!r} returned {number}")
        return number


def reward_function(function: Callable[..., Any]) -> RewardFunction:
    """Register `f(prompts, completions, **columns)`; it may be async.

    `columns` are the entries of the cases' `expect` and `metadata`, a list each.

    Raises:
        MeasureDefinitionError: It does not take completions, or not by name.
    """
    name = getattr(function, "__name__", repr(function))
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if not takes_all:
        raise MeasureDefinitionError(
            f"reward function {name!r} must take **columns, whatever else it names"
        )
    return RewardFunction(name, function)
