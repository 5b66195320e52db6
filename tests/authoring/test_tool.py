import asyncio
import enum
from typing import Annotated, Literal

import pydantic
import pytest

from dressage.authoring import function_tool
from dressage.authoring.errors import ToolArgumentsError, ToolDefinitionError


def google(city: str, days: int = 3) -> str:
    """Look the weather up.

    Args:
        city: Where.
        days: How many
            days ahead.
    """
    return f"{city} {days}"


def numpy(city: str, days: int = 3) -> str:
    """Look the weather up.

    Parameters
    ----------
    city : str
        Where.
    days : int
        How many
        days ahead.
    """
    return f"{city} {days}"


def sphinx(city: str, days: int = 3) -> str:
    """Look the weather up.

    :param city: Where.
    :param days: How many
        days ahead.
    """
    return f"{city} {days}"


@pytest.mark.parametrize("function", [google, numpy, sphinx])
def test_schema_from_signature_and_docstring(function):
    assert function_tool(function).schema == {
        "type": "function",
        "function": {
            "name": function.__name__,
            "description": "Look the weather up.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"description": "Where.", "type": "string"},
                    "days": {
                        "default": 3,
                        "description": "How many\ndays ahead.",
                        "type": "integer",
                    },
                },
                "required": ["city"],
            },
        },
    }


def test_a_tool_is_still_a_function():
    assert function_tool(google)("Bern", days=1) == "Bern 1"


class Unit(enum.StrEnum):
    CELSIUS = "c"
    KELVIN = "k"


class Place(pydantic.BaseModel):
    title: str
    inner: "Place | None" = None


def test_rich_types_have_schemas_and_arrive_as_objects():
    @function_tool
    async def measure(
        place: Place,
        /,
        unit: Unit,
        mode: Literal["fast", "slow"] = "fast",
        tags: list[str] | None = None,
        limit: Annotated[int, pydantic.Field(ge=1)] = 5,
    ) -> str:
        """Measure."""
        assert isinstance(place, Place)
        return f"{place.title} {unit.name} {mode} {tags} {limit}"

    properties = measure.parameters["properties"]
    assert measure.parameters["required"] == ["place", "unit"]
    assert properties["place"]["properties"]["title"] == {"type": "string"}
    assert properties["unit"]["enum"] == ["c", "k"]
    assert "$ref" not in str(properties)
    got = asyncio.run(measure.invoke({"place": {"title": "Bern"}, "unit": "k", "tags": ["a"]}))
    assert got == "Bern KELVIN fast ['a'] 5"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({}, "city: Field required"),
        ({"city": "Bern", "colour": 1}, "colour: Extra inputs are not permitted"),
        ({"city": "Bern", "days": "many"}, "days: Input should be a valid integer"),
    ],
)
def test_arguments_that_do_not_fit_are_explained_to_the_model(arguments, sentence):
    with pytest.raises(ToolArgumentsError, match=sentence):
        asyncio.run(function_tool(google).invoke(arguments))


def no_annotation(city) -> str:
    """Look."""
    return city


def no_docstring(city: str) -> str:
    return city


def star(*cities: str) -> str:
    """Look."""
    return str(cities)


def no_schema(city: object, call: type[print]) -> str:  # type: ignore[valid-type]
    """Look."""
    return str(city)


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (no_annotation, "'no_annotation': parameter 'city' has no type annotation"),
        (no_docstring, "'no_docstring' has no docstring"),
        (star, r"'star' takes \*cities"),
        (no_schema, "'no_schema'"),
    ],
)
def test_a_tool_without_usable_schema_is_refused_by_name(function, sentence):
    with pytest.raises(ToolDefinitionError, match=sentence):
        function_tool(function)
