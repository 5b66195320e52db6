"""A typed Python function in, a tool with a JSON schema out.

Not here: running tools in isolation (dressage.sandbox) or showing them to a model (chat templates).
"""

import inspect
import json
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import docstring_parser
import pydantic
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticUserError

from dressage.authoring.errors import ToolArgumentsError, ToolDefinitionError
from dressage.spec.chat import ToolSchema


@dataclass(frozen=True)
class FunctionTool:
    """A callable that a model may call, with the one schema everybody sees.

    Attributes:
        name: What the model writes to call it.
        description: First paragraph of the docstring.
        parameters: JSON schema of the arguments object.
        function: The author's function, sync or async.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    function: Callable[..., Any]
    arguments_model: type[pydantic.BaseModel] = field(repr=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the author's function as if it were not decorated."""
        return self.function(*args, **kwargs)

    @property
    def schema(self) -> ToolSchema:
        """The tool in the form chat templates and OpenAI-compatible servers take.

        There is no `return` entry: servers render tools without one, and a model trained on
        another prompt than it is served with gets worse.
        """
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": self.parameters,
            },
        }

    async def invoke(self, arguments: dict[str, Any]) -> Any:
        """Check the model's arguments against the schema and call the function.

        Raises:
            ToolArgumentsError: The arguments do not fit; the message is meant for the model.
        """
        try:
            # As JSON, strictly: `true` is no number, and 2.0 is no whole one.
            checked = self.arguments_model.model_validate_json(json.dumps(arguments), strict=True)
        except pydantic.ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(str(part) for part in e['loc']) or 'arguments'}: {e['msg']}"
                for e in error.errors()
            )
            raise ToolArgumentsError(f"arguments do not fit {self.name}: {problems}") from None
        positional, named = [], {}
        for at, parameter in enumerate(inspect.signature(self.function).parameters.values()):
            value = getattr(checked, _field_name(at))
            if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
                positional.append(value)
            else:
                named[parameter.name] = value
        result = self.function(*positional, **named)
        return await result if inspect.isawaitable(result) else result


def function_tool(function: Callable[..., Any]) -> FunctionTool:
    """Make a tool of a function with annotated parameters and a docstring.

    Google, NumPy and Sphinx docstrings are understood. The function may be async.

    Raises:
        ToolDefinitionError: A parameter without annotation, `*args`/`**kwargs`, no docstring, or a
            type that has no JSON schema; the message names tool and parameter.
    """
    name = getattr(function, "__name__", repr(function))
    documentation = docstring_parser.parse(inspect.getdoc(function) or "")
    if not documentation.short_description:
        raise ToolDefinitionError(
            f"tool {name!r} has no docstring: the model needs one sentence on what the tool does"
        )
    described = {p.arg_name.lstrip("*"): p.description for p in documentation.params}
    arguments_model = _arguments_model(name, function, described)
    try:
        schema = without_titles(arguments_model.model_json_schema())
    except PydanticInvalidForJsonSchema as error:
        raise ToolDefinitionError(f"tool {name!r}: {error.message}") from None
    parameters = {"type": "object", "properties": schema.get("properties", {})}
    if schema.get("required"):
        parameters["required"] = schema["required"]
    paragraphs = [documentation.short_description, documentation.long_description]
    description = "\n\n".join(p for p in paragraphs if p)
    return FunctionTool(name, description, parameters, function, arguments_model)


def _arguments_model(
    name: str, function: Callable[..., Any], described: dict[str, str | None]
) -> type[pydantic.BaseModel]:
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ToolDefinitionError(f"tool {name!r} has an unknown annotation: {error}") from None
    fields: dict[str, Any] = {}
    for at, parameter in enumerate(inspect.signature(function).parameters.values()):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ToolDefinitionError(
                f"tool {name!r} takes *{parameter.name}: a model needs named, typed parameters"
            )
        if parameter.name not in hints:
            raise ToolDefinitionError(
                f"tool {name!r}: parameter {parameter.name!r} has no type annotation"
            )
        default = ... if parameter.default is parameter.empty else parameter.default
        about = described.get(parameter.name)
        ours = pydantic.Field(alias=parameter.name, description=about)
        bare, *theirs = (
            typing.get_args(hints[parameter.name])
            if typing.get_origin(hints[parameter.name]) is Annotated
            else (hints[parameter.name],)
        )
        # What the author says with a `Field` comes after what the docstring says, and wins.
        fields[_field_name(at)] = (Annotated[(bare, ours, *theirs)], default)
    try:
        return pydantic.create_model(name, __config__=pydantic.ConfigDict(extra="forbid"), **fields)
    except (PydanticUserError, TypeError, NameError) as error:
        raise ToolDefinitionError(f"tool {name!r}: {str(error).splitlines()[0]}") from None


def _field_name(at: int) -> str:
    """Of a parameter inside the model of arguments: its own name may mean something to pydantic."""
    return f"argument_{at}"


def without_titles(schema: dict[str, Any]) -> dict[str, Any]:
    """Replace `$ref` by what it points to and drop the generated titles: templates show less."""
    definitions = schema.get("$defs", {})

    def resolve(node: Any, seen: tuple[str, ...] = ()) -> Any:
        if isinstance(node, list):
            return [resolve(item, seen) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            target = node["$ref"].rsplit("/", 1)[-1]
            if target in seen:
                return {"type": "object"}
            rest = {key: value for key, value in node.items() if key != "$ref"}
            return resolve({**definitions[target], **rest}, (*seen, target))
        return {
            key: {name: resolve(sub, seen) for name, sub in value.items()}
            if key == "properties"
            else resolve(value, seen)
            for key, value in node.items()
            if not (key == "title" and isinstance(value, str)) and key != "$defs"
        }

    resolved: dict[str, Any] = resolve(schema)
    return resolved
