"""Stateful worlds: one instance plays one rollout, and its public methods are the tools."""

import inspect
import types
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any

from dressage.authoring.errors import ToolDefinitionError
from dressage.authoring.tool import FunctionTool, function_tool
from dressage.spec.chat import Message

NOT_TOOLS = ("reset", "close")
REWARDS = ("get_reward", "reward")  # other libraries' names for what measures do here


@dataclass(frozen=True)
class EnvironmentCase:
    """What `reset` is given.

    Attributes:
        input: The case's input: a string or chat messages.
        expect: The case's `expect` object. The agent never sees it.
        metadata: The case's `metadata` object.
        seed: The same for all rollouts of a case, so that a group meets one world.
    """

    input: str | list[Message]
    expect: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    seed: int = 0


class Environment:
    """Derive from it, and write public, typed methods with docstrings: they are the tools.

    An instance is made without arguments, reset once, played once, looked at by the measures
    (`context.environment`), and closed. Each lives in a process of its own. All methods may be
    async. A method that must not be a tool starts with an underscore.
    """

    def reset(self, case: EnvironmentCase) -> str | Awaitable[str | None] | None:  # noqa: ARG002
        """Prepare for a case. A text that is returned is added to the last user message."""
        return None

    def close(self) -> Awaitable[None] | None:
        """Give resources back. Called at the end, also after a failure."""
        return None


def reset(environment: Any, case: EnvironmentCase) -> Any:
    """Prepare an environment for a case, as its `reset` wants to be called.

    One that takes a positional argument gets the case; one that takes names alone gets `prompt`
    and the entries of `expect` and `metadata`, as TRL calls it.
    """
    parameters = inspect.signature(environment.reset).parameters.values()
    if any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters):
        return environment.reset(case)
    row = {"prompt": case.input, **case.metadata, **case.expect}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    wanted = {p.name for p in parameters}
    return environment.reset(**{n: v for n, v in row.items() if takes_all or n in wanted})


def is_environment(found: Any) -> bool:
    """Whether a class is an environment: ours, or one that TRL would take."""
    if not isinstance(found, type) or found is Environment:
        return False
    if issubclass(found, Environment):
        return True
    if not inspect.isfunction(getattr(found, "reset", None)):
        return False
    try:
        environment_tools(found)
    except ToolDefinitionError:
        return False
    return True


def environment_tools(kind: type) -> list[FunctionTool]:
    """The tools of an environment class.

    Raises:
        ToolDefinitionError: A public method cannot be a tool, or there is none.
    """
    methods = [
        function
        for name, function in inspect.getmembers(kind, predicate=inspect.isfunction)
        if not name.startswith("_") and name not in NOT_TOOLS
    ]
    rewards = [method.__name__ for method in methods if method.__name__ in REWARDS]
    if rewards:
        raise ToolDefinitionError(
            f"environment {kind.__name__!r}: {rewards[0]} would be shown to the model as a tool; "
            "write a measure, which sees the environment as `context.environment`, and begin the "
            "method's name with an underscore"
        )
    if not methods:
        raise ToolDefinitionError(f"environment {kind.__name__!r} has no public method")
    try:
        # Bound to nothing in particular: only the signature without `self` matters here.
        return [function_tool(types.MethodType(method, object())) for method in methods]
    except ToolDefinitionError as error:
        raise ToolDefinitionError(f"environment {kind.__name__!r}: {error}") from None
