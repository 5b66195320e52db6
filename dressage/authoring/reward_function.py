"""Reward functions as TRL has them: all completions of a step in, one number for each out."""

import inspect
import itertools
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from dressage.authoring.errors import MeasureDefinitionError, MeasureTypeError, ScoreRangeError

MAX_REWARD = 1e9  # so that sums, weights and squares of them stay numbers in single precision


@dataclass(frozen=True)
class RewardFunction:
    """A function registered as a reward function, known by its name."""

    name: str
    function: Callable[..., list[float | None] | Awaitable[list[float | None]]]

    def __call__(self, *args: Any, **columns: Any) -> Any:
        """Call the author's function as if it were not decorated."""
        return self.function(*args, **columns)

    def checked(self, result: Any, count: int) -> list[float | None]:
        """What the function gave back for so many completions: a number, or None, for each.

        Raises:
            MeasureTypeError: It is no series of numbers of the right length.
            ScoreRangeError: A number is not one, or too large to be trained with.
        """
        if isinstance(result, str | bytes | dict) or not isinstance(result, Iterable):
            raise MeasureTypeError(
                f"reward function {self.name!r} returned {type(result).__name__}; it must return "
                f"a list of {count} numbers, one for each completion"
            )
        values = list(itertools.islice(result, count + 1))  # a generator may not end
        if len(values) != count:
            found = "more" if len(values) > count else f"only {len(values)}"
            raise MeasureTypeError(
                f"reward function {self.name!r} returned {found} numbers for {count} completions"
            )
        return [self._number(value) for value in values]

    def _number(self, value: Any) -> float | None:
        if value is None:
            return None
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise MeasureTypeError(
                f"reward function {self.name!r} returned {type(value).__name__}, not a number"
            ) from None
        if not abs(number) <= MAX_REWARD:
            raise ScoreRangeError(
                f"reward function {self.name!r} returned {number}; a reward lies within "
                f"±{MAX_REWARD:g}"
            )
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
