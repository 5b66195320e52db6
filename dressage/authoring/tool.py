"""A typed Python function in, a tool with a JSON schema out.

Not here: running tools in isolation (dressage.sandbox) or showing them to a model (chat templates).
"""

import inspect
import json
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, overload

import pydantic
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticUserError
from pydantic.fields import FieldInfo

from dressage.authoring.docstrings import documentation_of
from dressage.authoring.errors import (
    ToolArgumentsError,
    ToolDefinitionError,
    UnknownAnnotationError,
)
from dressage.spec.chat import ToolSchema
from dressage.spec.tool_schema import canonical

GIVEN = ("default", "enum", "const", "examples")  # values of the author's, not schemas


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

    def start(self, arguments: dict[str, Any]) -> Any:
        """Check the model's arguments against the schema and call the function.

        Returns:
            What the function returns: of an async one, what is to be awaited.

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
        return self.function(*positional, **named)


@dataclass(frozen=True)
class PendingTool:
    """A tool whose annotations name something that its module defines further below."""

    function: Callable[..., Any]
    name: str | None
    description: str | None

    @property
    def __name__(self) -> str:
        """As it is looked for."""
        return self.name or self.function.__name__

    def resolved(self) -> FunctionTool:
        """The tool, once its module is whole.

        Raises:
            ToolDefinitionError: An annotation is still unknown, or as for `function_tool`.
        """
        return _tool(self.function, self.name, self.description)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the author's function as if it were not decorated."""
        return self.function(*args, **kwargs)


@overload
def function_tool(function: Callable[..., Any], /) -> FunctionTool: ...


@overload
def function_tool(
    *, name_override: str | None = None, description_override: str | None = None
) -> Callable[[Callable[..., Any]], FunctionTool]: ...


def function_tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name_override: str | None = None,
    description_override: str | None = None,
) -> Any:
    """Make a tool of a function with annotated parameters and a docstring.

    Google, NumPy and Sphinx docstrings are understood. The function may be async. With or without
    brackets: `@function_tool`, `@function_tool(name_override="add")`.

    Args:
        function: What the tool does.
        name_override: What the model calls it; the function's name unless given.
        description_override: What the model is told of it; the docstring unless given.

    Raises:
        ToolDefinitionError: A parameter without annotation, `*args`/`**kwargs`, no docstring, a
            default that JSON cannot say, or a type that has no JSON schema; the message names tool
            and parameter.
    """
    if function is None:
        return partial(_decorated, name=name_override, description=description_override)
    return _decorated(function, name_override, description_override)


def _decorated(
    function: Callable[..., Any], name: str | None, description: str | None
) -> FunctionTool | PendingTool:
    try:
        return _tool(function, name, description)
    except UnknownAnnotationError:
        return PendingTool(function, name, description)


def _tool(
    function: Callable[..., Any], name_override: str | None, description_override: str | None
) -> FunctionTool:
    name = str(name_override or getattr(function, "__name__", repr(function)))
    documentation = documentation_of(inspect.getdoc(function) or "")
    description = description_override or documentation.description
    if not description:
        raise ToolDefinitionError(
            f"tool {name!r} has no docstring: the model needs one sentence on what the tool does"
        )
    arguments_model = _arguments_model(name, function, documentation.parameters)
    try:
        schema = without_titles(arguments_model.model_json_schema())
    except PydanticInvalidForJsonSchema as error:
        raise ToolDefinitionError(f"tool {name!r}: {error.message}") from None
    _require_defaults(name, function, schema)
    parameters: dict[str, Any] = {"type": "object", "properties": schema.get("properties", {})}
    if schema.get("required"):
        parameters["required"] = schema["required"]
    return FunctionTool(name, description, canonical(parameters), function, arguments_model)


def _require_defaults(name: str, function: Callable[..., Any], schema: dict[str, Any]) -> None:
    """Check that the model is told of every default as it is."""
    for parameter in inspect.signature(function).parameters.values():
        if parameter.default is parameter.empty or isinstance(parameter.default, FieldInfo):
            continue
        shown = schema.get("properties", {}).get(parameter.name, {})
        try:
            json.dumps(shown.get("default"), allow_nan=False)
            told = "default" in shown
        except ValueError:
            told = False
        if not told:
            raise ToolDefinitionError(
                f"tool {name!r}: the default of {parameter.name!r}, {parameter.default!r}, cannot "
                "be said in JSON; make it None and put the real one in the function"
            )


def _arguments_model(
    name: str, function: Callable[..., Any], described: dict[str, str]
) -> type[pydantic.BaseModel]:
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise UnknownAnnotationError(
            f"tool {name!r} has an unknown annotation: {error}; import it also where no type "
            "checker runs"
        ) from None
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
            else value
            if key in GIVEN
            else resolve(value, seen)
            for key, value in node.items()
            if not (key == "title" and isinstance(value, str)) and key != "$defs"
        }

    resolved: dict[str, Any] = resolve(schema)
    return resolved
