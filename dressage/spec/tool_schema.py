"""One form for the schema of a tool, for training, proof and every server.

Servers that parse a request's tools into structures of their own (Ollama) write them out again with
keys in their order, and drop what they do not know. A model is served what it was trained on when
it was trained on that: keys are always in this order, and the agent may leave out the rest.
"""

from typing import Any

from dressage.spec.chat import ToolFunction

# The order, and the whole of what Ollama shows, of a tool's parameters and of each property.
PARAMETERS = ("type", "$defs", "items", "required", "properties")
PROPERTY = ("anyOf", "type", "items", "description", "enum", "properties", "required")


def canonical(parameters: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of a tool's arguments with its keys in the one order."""
    return _ordered(parameters, PARAMETERS)


def for_ollama(tool: ToolFunction) -> tuple[ToolFunction, list[str]]:
    """A tool as Ollama shows it to a model, and what it leaves out of it (`n.minimum`)."""
    dropped: list[str] = []
    parameters = _reduced(tool["parameters"], PARAMETERS, "", dropped)
    return {**tool, "parameters": parameters}, dropped


def _ordered(schema: dict[str, Any], order: tuple[str, ...]) -> dict[str, Any]:
    known = [key for key in order if key in schema]
    rest = [key for key in schema if key not in order]
    return {key: _part(key, schema[key]) for key in (*known, *rest)}


def _part(key: str, value: Any) -> Any:
    if key == "properties" and isinstance(value, dict):
        return {
            name: _ordered(sub, PROPERTY) if isinstance(sub, dict) else sub
            for name, sub in value.items()
        }
    if key == "anyOf" and isinstance(value, list):
        return [_ordered(sub, PROPERTY) if isinstance(sub, dict) else sub for sub in value]
    return _sorted(value) if key in ("items", "$defs") else value


def _sorted(value: Any) -> Any:
    """What Ollama keeps as it is, and writes with its keys in the order of the alphabet."""
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list) else value


def _reduced(
    schema: dict[str, Any], kept: tuple[str, ...], place: str, dropped: list[str]
) -> dict[str, Any]:
    dropped += [f"{place}{key}" for key in schema if key not in kept]
    found = {key: value for key, value in schema.items() if key in kept}
    if isinstance(found.get("properties"), dict):
        found["properties"] = {
            name: _reduced(sub, PROPERTY, f"{place}{name}.", dropped)
            if isinstance(sub, dict)
            else sub
            for name, sub in found["properties"].items()
        }
    if isinstance(found.get("anyOf"), list):
        found["anyOf"] = [
            _reduced(sub, PROPERTY, f"{place}anyOf.{at}.", dropped)
            if isinstance(sub, dict)
            else sub
            for at, sub in enumerate(found["anyOf"])
        ]
    return canonical(found) if kept is PARAMETERS else _ordered(found, PROPERTY)
