"""Measures: one finished rollout in, pass / fail / score with a reason out.

Not here: the weights (worker.training.rewards) and where measures run (dressage.sandbox).
"""

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from dressage.authoring.errors import MeasureDefinitionError, MeasureTypeError, ScoreRangeError
from dressage.spec.chat import Message


@dataclass(frozen=True)
class MeasureResult:
    """The verdict of one measure on one rollout.

    Attributes:
        value: 1.0 for pass, 0.0 for fail, anything between for a score.
        reason: One sentence for the person who reads the rollout.
        passed: Whether it said pass or fail; None for a score.
    """

    value: float
    reason: str
    passed: bool | None = None


def pass_reason(text: str) -> MeasureResult:
    """The rollout did what the measure asks for."""
    return MeasureResult(1.0, text, passed=True)


def fail_reason(text: str) -> MeasureResult:
    """The rollout did not do what the measure asks for."""
    return MeasureResult(0.0, text, passed=False)


def score(value: float, reason: str) -> MeasureResult:
    """A partial result.

    Raises:
        MeasureTypeError: The value is no number: a text, or true or false.
        ScoreRangeError: The value lies outside [0, 1].
    """
    if isinstance(value, bool | str) or not hasattr(value, "__float__"):
        raise MeasureTypeError(
            f"a score is a number from 0 to 1, not {value!r}; for yes or no there are pass_reason "
            "and fail_reason"
        )
    if not 0.0 <= value <= 1.0:
        raise ScoreRangeError(f"a score lies in [0, 1], got {value!r}")
    return MeasureResult(float(value), reason)


@dataclass(frozen=True)
class ToolCall:
    """One call the model made, and what came back."""

    name: str
    arguments: dict[str, Any]
    result: str | None
    error: str | None


@dataclass(frozen=True)
class AssistantMessage:
    """The last thing the model said."""

    text: str


@dataclass(frozen=True)
class MeasureContext:
    """Everything a measure may look at.

    Attributes:
        input: The case's input, as in the suite: a string or chat messages.
        expect: The case's `expect` object.
        metadata: The case's `metadata` object.
        messages: The whole conversation of the rollout, system and user turns included.
        final: The final assistant message; `.text` is empty when there is none.
        tool_calls: Every tool call in order.
        stop_reason: Why the rollout ended (`completed`, `max_completion_length`, …).
        environment: The environment as the rollout left it, for agents that have one.
        prompt_length: How many of `messages` were there before the agent began.
        extra: What a rollout function returned beside its rollouts, by name.
    """

    input: str | list[Message]
    expect: dict[str, Any]
    metadata: dict[str, Any] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    final: AssistantMessage = AssistantMessage("")
    tool_calls: list[ToolCall] = field(default_factory=list)
    stop_reason: str = "completed"
    environment: Any = None
    prompt_length: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def final_assistant_message(self) -> AssistantMessage:
        """The same as `final`."""
        return self.final


@dataclass(frozen=True)
class Measure:
    """A function registered as a measure, known by its name."""

    name: str
    function: Callable[[MeasureContext], MeasureResult | Awaitable[MeasureResult]]

    def __call__(self, context: MeasureContext) -> MeasureResult | Awaitable[MeasureResult]:
        """Call the author's function as if it were not decorated."""
        return self.function(context)

    def checked(self, result: Any) -> MeasureResult:
        """What the function gave back, if it is a verdict.

        Raises:
            MeasureTypeError: Something else than `pass_reason`, `fail_reason` or `score` came back.
            ScoreRangeError: Its value lies outside [0, 1].
        """
        if not isinstance(result, MeasureResult):
            raise MeasureTypeError(
                f"measure {self.name!r} returned {type(result).__name__}; return pass_reason(…), "
                "fail_reason(…) or score(…)"
            )
        return replace(score(result.value, result.reason), passed=result.passed)


def measure(function: Callable[[MeasureContext], Any]) -> Measure:
    """Register a function of one argument, the context, as a measure. It may be async.

    Raises:
        MeasureDefinitionError: The function does not take exactly one argument.
    """
    name = getattr(function, "__name__", repr(function))
    required = [
        p
        for p in inspect.signature(function).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if len(required) != 1:
        raise MeasureDefinitionError(
            f"measure {name!r} takes {len(required)} arguments; it must take one, the context"
        )
    return Measure(name, function)
