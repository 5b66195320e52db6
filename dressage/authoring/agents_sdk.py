"""Tools made with the `openai-agents` SDK, as ours. The SDK itself is not needed to use this."""

import inspect
import json
from typing import Any

import jsonschema
import pydantic

from dressage.authoring.errors import ToolArgumentsError
from dressage.authoring.tool import FunctionTool, without_titles
from dressage.spec.tool_schema import canonical


def is_sdk_tool(found: Any) -> bool:
    """Whether this is a `FunctionTool` of the SDK."""
    kind = type(found)
    return kind.__name__ == "FunctionTool" and kind.__module__.split(".")[0] == "agents"


class SdkTool(FunctionTool):
    """Calls the SDK's tool the way its runner does."""

    def start(self, arguments: dict[str, Any]) -> Any:
        """Check the arguments against the schema and call the tool.

        Raises:
            ToolArgumentsError: The arguments do not fit; the message is meant for the model.
        """
        from agents.tool_context import ToolContext

        problem = jsonschema.exceptions.best_match(
            jsonschema.Draft202012Validator(self.parameters).iter_errors(arguments)
        )
        if problem:
            raise ToolArgumentsError(f"arguments do not fit {self.name}: {problem.message}")
        text = json.dumps(arguments)
        context: Any = ToolContext(
            context=None, tool_name=self.name, tool_call_id="call", tool_arguments=text
        )
        return self.function(context, text)


class SdkToolFailed(Exception):
    """A tool has raised; the text is what the SDK shows the model of it."""


def _tell_failures(tool: Any) -> None:
    """Have a tool that raises be seen as failed: the SDK makes an ordinary result of its text."""
    try:
        from agents.tool import (
            resolve_function_tool_failure_error_function,
            set_function_tool_failure_error_function,
        )
    except ImportError:  # an SDK of before these: its text is a result like others
        return

    async def tell(context: Any, error: Exception) -> Any:
        text: Any = shown(context, error) if shown else f"{type(error).__name__}: {error}"
        if inspect.isawaitable(text):
            text = await text
        raise SdkToolFailed(str(text)) from error

    shown = resolve_function_tool_failure_error_function(tool, None)
    set_function_tool_failure_error_function(tool, tell)


def from_sdk(tool: Any) -> SdkTool:
    """One of the SDK's tools as ours, with the same name, description and schema."""
    _tell_failures(tool)
    return SdkTool(
        tool.name,
        tool.description,
        canonical(without_titles(tool.params_json_schema)),
        tool.on_invoke_tool,
        pydantic.BaseModel,
    )
