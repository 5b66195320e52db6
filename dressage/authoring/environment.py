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


def environment_tools(kind: type[Environment]) -> list[FunctionTool]:
    """The tools of an environment class.

    Raises:
        ToolDefinitionError: A public method cannot be a tool, or there is none.
    """
    methods = [
        function
        for name, function in inspect.getmembers(kind, predicate=inspect.isfunction)
        if not name.startswith("_") and name not in NOT_TOOLS
    ]
    if not methods:
        raise ToolDefinitionError(f"environment {kind.__name__!r} has no public method")
    try:
        # Bound to nothing in particular: only the signature without `self` matters here.
        return [function_tool(types.MethodType(method, object())) for method in methods]
    except ToolDefinitionError as error:
        raise ToolDefinitionError(f"environment {kind.__name__!r}: {error}") from None
