"""Cases, and the suite as the service shows it."""

from datetime import datetime
from typing import Any, Literal

from pydantic import Field, field_validator

from dressage.spec.base import Spec, View
from dressage.spec.chat import Message


class ChatMessage(Spec):
    """One turn of a case whose input is a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


class Case(Spec):
    """One exercise: what the agent gets, and what is expected of it."""

    id: str = Field(min_length=1, max_length=200)
    input: str | tuple[ChatMessage, ...]
    expect: dict[str, Any] = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)

    @field_validator("input")
    @classmethod
    def _not_empty(cls, value: str | tuple[ChatMessage, ...]) -> str | tuple[ChatMessage, ...]:
        if isinstance(value, str):
            if not value.strip():
                raise ValueError("input is empty")
        elif not value or value[-1].role != "user":
            raise ValueError("a conversation must end with a user message")
        return value

    def conversation(self, instructions: str | None, *, added: str | None = None) -> list[Message]:
        """What a model is shown: the agent's instructions and the input, as chat messages.

        Args:
            instructions: The agent's system prompt.
            added: What an environment adds to the last user message.
        """
        turns: list[Message] = (
            [{"role": "user", "content": self.input}]
            if isinstance(self.input, str)
            else [{"role": turn.role, "content": turn.content} for turn in self.input]
        )
        if added:
            turns[-1]["content"] = f"{turns[-1]['content']}{added}"
        if instructions:
            turns.insert(0, {"role": "system", "content": instructions})
        return turns


class ToolInfo(Spec):
    """A tool found in a suite's code."""

    name: str
    description: str
    parameters: dict[str, Any]


class EnvironmentInfo(Spec):
    """An environment found in a suite's code, and the tools it offers."""

    name: str
    tools: tuple[ToolInfo, ...]


class SuiteInfo(View):
    """A stored suite. Immutable: new content is a new version."""

    id: str
    team: str
    name: str
    version: int
    content_hash: str
    case_count: int
    tools: tuple[ToolInfo, ...] = ()
    measures: tuple[str, ...] = ()
    reward_functions: tuple[str, ...] = ()
    rollout_funcs: tuple[str, ...] = ()
    environments: tuple[EnvironmentInfo, ...] = ()
    created_at: datetime

    @property
    def reference(self) -> str:
        """The exact version, as a job names it."""
        return f"{self.name}@{self.version}"


class SuitePage(Spec):
    """One page of a list; pass `next_cursor` as `cursor` for the next one."""

    items: tuple[SuiteInfo, ...]
    next_cursor: str | None = None


class CasePage(Spec):
    """One page of a suite's cases."""

    items: tuple[Case, ...]
    next_cursor: str | None = None
