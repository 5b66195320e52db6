"""Chat messages and tool schemas as templates, servers and user code take them: dictionaries."""

from typing import Any, Literal, Required, TypedDict


class FunctionCall(TypedDict):
    """What a model wants to call. Arguments are an object, or text that it did not get right."""

    name: str
    arguments: Any


class RequestedCall(TypedDict, total=False):
    """One entry of an assistant message's `tool_calls`."""

    id: str
    type: Required[Literal["function"]]
    function: Required[FunctionCall]


class Message(TypedDict, total=False):
    """One turn of a conversation."""

    role: Required[str]
    content: str | None
    name: str
    reasoning_content: str
    tool_calls: list[RequestedCall]
    tool_call_id: str


class ToolFunction(TypedDict):
    """A tool by its name and the JSON schema of its arguments."""

    name: str
    description: str
    parameters: dict[str, Any]


class ToolSchema(TypedDict):
    """A tool in the form that chat templates and OpenAI-compatible servers take."""

    type: Literal["function"]
    function: ToolFunction
