import asyncio
import datetime
import enum
import inspect
from enum import StrEnum
from typing import Annotated, Any, Literal

import pydantic
import pytest
from pydantic import Field

from dressage.authoring import function_tool
from dressage.authoring.errors import ToolArgumentsError, ToolDefinitionError


def called(tool, arguments):
    result = tool.start(arguments)
    return asyncio.run(result) if inspect.iscoroutine(result) else result


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
    got = called(measure, {"place": {"title": "Bern"}, "unit": "k", "tags": ["a"]})
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
        called(function_tool(google), arguments)


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


def test_descriptions_are_kept_wherever_they_are_written():
    def look(
        a: Annotated[str, Field(description="in the annotation")],
        b: int = Field(3, description="in the default", ge=1),
        c: Annotated[int, Field(ge=0)] = 1,
        d: str = "x",
    ) -> str:
        """Look.

        Args:
            a: Not this one.
            b: Nor this.
            c: In the docstring.
            d: In the docstring, too.
        """
        return f"{a}{b}{c}{d}"

    tool = function_tool(look)
    shown = tool.schema["function"]["parameters"]["properties"]
    assert [shown[name]["description"] for name in "abcd"] == [
        "in the annotation",
        "in the default",
        "In the docstring.",
        "In the docstring, too.",
    ]
    assert (shown["b"]["minimum"], shown["b"]["default"], shown["c"]["minimum"]) == (1, 3, 0)
    assert called(tool, {"a": "q"}) == "q31x"


def test_a_parameter_may_have_any_name():
    def strange(model_extra: int, model_config: int, model_fields_set: int, schema: int) -> list:
        """Names that mean something to pydantic."""
        return [model_extra, model_config, model_fields_set, schema]

    tool = function_tool(strange)
    names = ["model_extra", "model_config", "model_fields_set", "schema"]
    assert tool.schema["function"]["parameters"]["required"] == names
    assert called(tool, dict(zip(names, range(4), strict=True))) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("value", "fits"),
    [(1, True), (True, False), (2.0, False), ("1", False), (None, False)],
)
def test_arguments_have_the_types_of_json(value, fits):
    def take(n: int) -> int:
        """Take a number."""
        return n

    tool = function_tool(take)
    if fits:
        assert called(tool, {"n": value}) == value
        return
    with pytest.raises(ToolArgumentsError, match="n: "):
        called(tool, {"n": value})


def test_arguments_that_json_has_no_type_for_are_read_from_text():
    def take(day: datetime.date, kinds: set[Kind], share: float) -> str:
        """Take something."""
        return f"{day:%d.%m.%Y} {sorted(map(str, kinds))} {share}"

    given = {"day": "2026-11-29", "kinds": ["a", "b"], "share": 1}
    assert called(function_tool(take), given) == "29.11.2026 ['a', 'b'] 1.0"


class Kind(StrEnum):
    A = "a"
    B = "b"


@pytest.mark.parametrize(
    "docstring",
    [
        "Find.\n\nKeyword Args:\n    city: Where.\n    n: How many.\n",
        "Find.\n\nArgs:\n    - city: Where.\n    * n (int): How many.\n",
        "Find.\n\nArgs:\n    city - Where.\n    n \u2013 How many.\n",
        "Find.\n\nArgs:\n    city: Where.\n\nKeyword Args:\n    n: How many.\n",
        "Find.\n\nParameters\n----------\ncity : str\n    Where.\nn : int\n    How many.\n",
        "Find.\n\n:param city: Where.\n:param n: How many.\n",
    ],
)
def test_every_shape_of_a_docstring_describes_the_parameters(docstring):
    def find(city: str, n: int) -> str:
        return f"{city}{n}"

    find.__doc__ = docstring
    tool = function_tool(find)
    assert tool.description == "Find."
    shown = tool.parameters["properties"]
    assert (shown["city"]["description"], shown["n"]["description"]) == ("Where.", "How many.")


def test_several_names_in_a_line_of_numpy_share_what_is_said():
    def at(x: float, y: float) -> str:
        """Look.

        Parameters
        ----------
        x, y : float
            Coordinates.
        """
        return f"{x}{y}"

    shown = function_tool(at).parameters["properties"]
    assert [shown[name]["description"] for name in "xy"] == ["Coordinates.", "Coordinates."]


def test_a_docstring_of_arguments_alone_is_no_description():
    def find(city: str) -> str:
        """Args:
        city: Where.
        """
        return city

    with pytest.raises(ToolDefinitionError, match="'find' has no docstring"):
        function_tool(find)
    tool = function_tool(name_override="look", description_override="Look there.")(find)
    assert (tool.name, tool.description) == ("look", "Look there.")
    assert called(tool, {"city": "Bern"}) == "Bern"


@pytest.mark.parametrize("default", [float("inf"), float("nan"), object()])
def test_a_default_that_json_cannot_say_is_refused_by_name(default):
    def wait(seconds: Any = default) -> str:
        """Wait."""
        return str(seconds)

    with pytest.raises(ToolDefinitionError, match="tool 'wait': the default of 'seconds'"):
        function_tool(wait)


def test_a_key_named_title_inside_of_a_default_is_the_authors():
    def place(where: dict[str, str] = {"title": "Bern", "x": "y"}) -> str:  # noqa: B006
        """Put."""
        return str(where)

    shown = function_tool(place).parameters["properties"]["where"]
    assert shown["default"] == {"title": "Bern", "x": "y"}
