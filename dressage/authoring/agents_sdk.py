"""Tools made with the `openai-agents` SDK, as ours. The SDK itself is not needed to use this."""

import json
from typing import Any

import jsonschema
import pydantic

from dressage.authoring.errors import ToolArgumentsError
from dressage.authoring.tool import FunctionTool, without_titles


def is_sdk_tool(found: Any) -> bool:
    """Whether this is a `FunctionTool` of the SDK."""
    kind = type(found)
    return kind.__name__ == "FunctionTool" and kind.__module__.split(".")[0] == "agents"


class SdkTool(FunctionTool):
    """Calls the SDK's tool the way its runner does."""

    async def invoke(self, arguments: dict[str, Any]) -> Any:
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
        return await self.function(context, text)


def from_sdk(tool: Any) -> SdkTool:
    """One of the SDK's tools as ours, with the same name, description and schema."""
    return SdkTool(
        tool.name,
        tool.description,
        without_titles(tool.params_json_schema),
        tool.on_invoke_tool,
        pydantic.BaseModel,
    )
