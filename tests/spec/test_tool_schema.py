"""A tool's schema in the one form that is trained, proved and served."""

import json

from hypothesis import given
from hypothesis import strategies as st

from dressage.authoring import function_tool
from dressage.spec.agent import AgentSpec
from dressage.spec.tool_schema import canonical, for_ollama
from tests.ollama_server import as_ollama_has


def search(words: list[str], where: dict[str, int] | None = None, limit: int = 3) -> str:
    """Find something.

    Args:
        words: What for.
        where: Places with weights.
        limit: How many.
    """
    return f"{words}{where}{limit}"


def test_keys_stand_in_the_order_in_which_ollama_writes_them():
    parameters = function_tool(search).parameters
    assert list(parameters) == ["type", "required", "properties"]
    assert list(parameters["properties"]) == ["words", "where", "limit"]
    assert list(parameters["properties"]["words"]) == ["type", "items", "description"]
    assert list(parameters["properties"]["where"])[:2] == ["anyOf", "description"]


def test_what_ollama_drops_is_named_and_the_rest_passes_through_it_unchanged():
    tool = function_tool(search).schema
    shown, dropped = for_ollama(tool["function"])
    assert "limit.default" in dropped
    assert "where.default" in dropped
    assert json.dumps(as_ollama_has({"type": "function", "function": shown})["function"]) == (
        json.dumps(shown)
    )
    agent = AgentSpec(model="Org/Name", tools=("search",), tool_schema="ollama")
    assert agent.tool_schemas([tool["function"]], []) == [shown]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
)
NAMES = st.sampled_from(
    ["type", "description", "enum", "default", "items", "anyOf", "properties", "title", "required"]
)
SCHEMAS = st.recursive(
    st.dictionaries(NAMES.filter(lambda n: n not in ("properties", "anyOf")), JSON, max_size=4),
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "type": st.just("object"),
            "properties": st.dictionaries(st.text(max_size=4), inner, max_size=3),
            "anyOf": st.lists(inner, max_size=2),
            "minimum": st.integers(),
        },
    ),
    max_leaves=8,
)


@given(SCHEMAS)
def test_the_one_order_changes_no_value_and_is_final(schema):
    ordered = canonical(schema)
    assert ordered == schema
    assert json.dumps(canonical(ordered)) == json.dumps(ordered)


@given(SCHEMAS)
def test_any_reduced_tool_passes_through_ollama_unchanged(schema):
    tool = {"name": "t", "description": "d", "parameters": {"properties": {}, **schema}}
    shown, _ = for_ollama(tool)
    served = as_ollama_has({"type": "function", "function": shown})["function"]
    assert json.dumps(served) == json.dumps(shown)
