"""Cases, and the suite as the service shows it."""

import hashlib
import json
from datetime import datetime
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Discriminator,
    Field,
    SerializerFunctionWrapHandler,
    Tag,
    field_validator,
    model_serializer,
    model_validator,
)

from dressage import strict_json
from dressage.spec.base import Spec, View
from dressage.spec.chat import Message

PLACES = 1000  # a share of held-out cases is kept to so many parts


class CalledFunction(Spec):
    """What was called, with its arguments: an object, also where the wire has it as a text."""

    name: str = Field(min_length=1)
    arguments: dict[str, Any] = Field(default_factory=dict)

    @field_validator("arguments", mode="before")
    @classmethod
    def _object(cls, arguments: Any) -> Any:
        if isinstance(arguments, str):
            try:
                return strict_json.loads(arguments or "{}")
            except ValueError as error:
                raise ValueError(f"the text is not JSON: {error}") from None
        return arguments


class ChatToolCall(Spec):
    """A call in an earlier assistant turn."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Spec):
    """One turn of a case whose input is a conversation, as OpenAI's API has it."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: tuple[ChatToolCall, ...] | None = None
    tool_call_id: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _text(cls, content: Any) -> Any:
        """Parts of text are one text; anything else than text cannot be shown to a model here."""
        if not isinstance(content, list):
            return content
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if kind != "text" or not isinstance(part.get("text"), str):
                raise ValueError(f"a part of type {kind!r}: only text can be trained on")
        return "".join(part["text"] for part in content)

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"a {self.role} turn has tool_calls; only the assistant calls tools")
        if self.content is None and not self.tool_calls:
            raise ValueError(f"a {self.role} turn has no content")
        return self

    @model_serializer(mode="wrap")
    def _nothing_added(self, wrapped: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in wrapped(self).items() if value is not None}


def _kind(given: Any) -> str:
    return "text" if isinstance(given, str) else "conversation"


Input = Annotated[
    Annotated[str, Tag("text")] | Annotated[tuple[ChatMessage, ...], Tag("conversation")],
    Discriminator(_kind),
]


class Case(Spec):
    """One exercise: what the agent gets, and what is expected of it."""

    id: str = Field(min_length=1, max_length=200)
    input: Input
    expect: dict[str, Any] = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)

    @field_validator("input")
    @classmethod
    def _not_empty(cls, value: str | tuple[ChatMessage, ...]) -> str | tuple[ChatMessage, ...]:
        if isinstance(value, str):
            if not value.strip():
                raise ValueError("input is empty")
            return value
        if not value or value[-1].role not in ("user", "tool"):
            raise ValueError("a conversation must end with a user message, or a tool's result")
        called: set[str | None] = set()
        for at, turn in enumerate(value):
            if turn.role == "system" and at:
                raise ValueError(f"turn {at}: a system message stands at the beginning, alone")
            if turn.role == "tool" and not called:
                raise ValueError(f"turn {at}: a tool's result comes after the call of a tool")
            called |= {call.id for call in turn.tool_calls or ()}
        return value

    @property
    def system_message(self) -> str | None:
        """Its own system message, for a conversation that has one."""
        if isinstance(self.input, str) or self.input[0].role != "system":
            return None
        return self.input[0].content

    @cached_property
    def content_hash(self) -> str:
        """The same for cases that ask the same and expect the same, whatever their ids."""
        content = self.model_dump(mode="json", include={"input", "expect"})
        text = json.dumps(content, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def place(self) -> int:
        """A number from 0 to `PLACES` - 1 by content alone, which decides who is held out."""
        return int(self.content_hash[:12], 16) % PLACES

    def conversation(self, instructions: str | None, *, added: str | None = None) -> list[Message]:
        """What a model is shown: the agent's instructions and the input, as chat messages.

        A case's own system message follows the instructions, in one message: many chat templates
        take no second one.

        Args:
            instructions: The agent's system prompt.
            added: What an environment adds to the last user message.
        """
        turns: list[Message] = (
            [{"role": "user", "content": self.input}]
            if isinstance(self.input, str)
            else [turn.model_dump(mode="json") for turn in self.input]  # type: ignore[misc]
        )
        if added:
            last = next((t for t in reversed(turns) if t["role"] == "user"), turns[-1])
            last["content"] = f"{last['content']}{added}"
        if instructions and turns[0]["role"] == "system":
            turns[0]["content"] = f"{instructions}\n\n{turns[0]['content']}"
        elif instructions:
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
    repeated_cases: int = Field(
        default=0, description="Cases that ask and expect what an earlier one does."
    )
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
