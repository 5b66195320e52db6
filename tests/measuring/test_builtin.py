from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from dressage.authoring import MeasureContext
from dressage.authoring.measure import AssistantMessage, ToolCall
from dressage.sandbox.builtin import MissingExpectation, evaluate
from dressage.sandbox.numbers import last_number
from dressage.spec.measure import BuiltinMeasure, RewardSpec

MEASURE = TypeAdapter(BuiltinMeasure)


def call(name, error=None):
    return ToolCall(name, {}, None if error else "ok", error)


def verdict(spec, text="", *, expect=None, calls=()):
    context = MeasureContext(
        input="q",
        expect={"answer": "42"} if expect is None else expect,
        final=AssistantMessage(text),
        tool_calls=list(calls),
    )
    return evaluate(MEASURE.validate_python(spec), context).value


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TWO = {"type": "tool_sequence", "tools": ["a", "b"]}


@pytest.mark.parametrize(
    ("spec", "scores", "does_not"),
    [
        ({"type": "exact_match"}, {"text": " 42 "}, {"text": "42 or so"}),
        (
            {"type": "exact_match", "case_sensitive": True},
            {"text": "Bern", "expect": {"answer": "Bern"}},
            {"text": "bern", "expect": {"answer": "Bern"}},
        ),
        (
            {"type": "exact_match"},
            {"text": "cafe\u0301", "expect": {"answer": "CAFÉ"}},
            {"text": "", "expect": {"answer": "x"}},
        ),
        ({"type": "contains"}, {"text": "It is 42."}, {"text": "It is 4 2."}),
        ({"type": "regex", "pattern": r"^\d+$"}, {"text": "7"}, {"text": "seven"}),
        ({"type": "regex", "pattern": ".*"}, {"text": "x"}, {"text": ""}),
        ({"type": "numeric"}, {"text": "so 42.0000001"}, {"text": "so 42.1"}),
        (
            {"type": "numeric", "tolerance": 0.01},
            {"text": "1,010 apples", "expect": {"answer": 1000}},
            {"text": "1,011 apples", "expect": {"answer": 1000}},
        ),
        ({"type": "json_schema", "schema": SCHEMA}, {"text": '{"a": 1}'}, {"text": '{"a": "1"}'}),
        (
            {
                "type": "json_schema",
                "schema": {
                    "$schema": "http://json-schema.org/draft-04/schema#",
                    "maximum": 3,
                    "exclusiveMaximum": True,  # a boolean in draft 4 alone
                },
            },
            {"text": "2"},
            {"text": "3"},
        ),
        ({"type": "tool_called", "tool": "a"}, {"calls": [call("a")]}, {"calls": [call("a", "e")]}),
        (
            {"type": "tool_called", "tool": "a", "times": 2},
            {"calls": [call("a"), call("b"), call("a")]},
            {"calls": [call("a")]},
        ),
        (
            {"type": "tool_not_called", "tool": "a"},
            {"text": "x", "calls": [call("b")]},
            {"text": "", "calls": []},
        ),
        (TWO, {"calls": [call("a"), call("x"), call("b")]}, {"calls": [call("b"), call("a")]}),
        (
            {**TWO, "exact": True},
            {"calls": [call("a"), call("b")]},
            {"calls": [call("a"), call("x"), call("b")]},
        ),
        (
            {"type": "no_tool_errors"},
            {"calls": [call("a")]},
            {"calls": [call("a"), call("b", "e")]},
        ),
        ({"type": "no_tool_errors"}, {"calls": [call("a")]}, {"calls": []}),
        (
            {"type": "length_limit", "max_words": 2},
            {"text": "two words"},
            {"text": "now three words"},
        ),
    ],
)
def test_what_scores_and_what_must_not(spec, scores, does_not):
    assert verdict(spec, **scores) == 1.0
    assert verdict(spec, **does_not) == 0.0


@pytest.mark.parametrize(
    "spec",
    [
        {"type": "exact_match"},
        {"type": "contains"},
        {"type": "regex", "pattern": ""},
        {"type": "numeric"},
        {"type": "json_schema", "schema": {}},
        {"type": "tool_not_called", "tool": "a"},
        {"type": "no_tool_errors"},
        {"type": "length_limit", "max_words": 9},
    ],
)
@pytest.mark.parametrize("text", ["", " ", "\n\t"])
def test_an_empty_answer_never_scores(spec, text):
    if spec.get("pattern") == "":
        spec = {**spec, "pattern": "|x"}
    assert verdict(spec, text) == 0.0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("no number", None),
        ("1 and 2", 2),
        ("−5", -5),
        ("１２３", 123),
        ("1,234,567.89", 1234567.89),
        ("12,34", 12.34),
        ("10,00", 10),
        ("100 200", 200),
        ("-$1,234.50", -1234.5),
        ("_42_", 42),
        ("var_42", None),
        ("\N{VULGAR FRACTION ONE HALF}", 0.5),
        ("1\N{VULGAR FRACTION ONE HALF}", 1.5),
        ("3/4", 0.75),
        ("1 1/2", 1.5),
        ("on 3/4/2025", 2025),
        ("1/0", None),
        ("10\N{SUPERSCRIPT TWO}", None),
        ("9007199254740993", 9007199254740993),
        ("1 234\N{NO-BREAK SPACE}567", 234567),
        ("1e3", 1000),
        (".5", 0.5),
        ("$3.50.", 3.5),
        ("7%", 7),
        ("version v2", None),
    ],
)
def test_number_formats(text, number):
    assert last_number(text) == (None if number is None else Decimal(str(number)))


@pytest.mark.parametrize(
    ("expected", "answer", "reward"),
    [
        (2**53, str(2**53 + 1), 0),
        (1_000_000, "1000001", 0),
        ("1e400", "5", 0),
        ("1e400", "1e400", 1),
        (0.3, "0.30000001", 1),
        (0.3, "0.3001", 0),
        (-1234.5, "it is -$1,234.50", 1),
        (0.75, "3/4", 1),
        (102, "10\N{SUPERSCRIPT TWO}", 0),
    ],
)
def test_numbers_are_compared_exactly(expected, answer, reward):
    assert verdict({"type": "numeric"}, answer, expect={"answer": expected}) == reward


@given(
    st.decimals(
        allow_nan=False, allow_infinity=False, places=3, min_value=-(10**9), max_value=10**9
    )
)
def test_a_number_is_read_as_it_was_written(number):
    assert last_number(f"it is {number}.") == number
    assert last_number(f"it is {number:,}") == number


@given(st.text(max_size=200))
def test_no_text_breaks_a_measure(text):
    for spec in (
        {"type": "numeric"},
        {"type": "exact_match"},
        {"type": "json_schema", "schema": {}},
    ):
        assert verdict(spec, text) in (0.0, 1.0)


def test_a_pattern_that_would_take_years_fails_the_answer():
    assert verdict({"type": "regex", "pattern": r"(a|aa)+$"}, "a" * 60 + "b") == 0.0


def test_a_case_without_expectation_is_the_measures_failure():
    for expect in ({}, {"answer": None}, {"answer": " "}):
        with pytest.raises(MissingExpectation):
            verdict({"type": "exact_match"}, "x", expect=expect)
    with pytest.raises(MissingExpectation, match="not a number"):
        verdict({"type": "numeric"}, "1", expect={"answer": "many"})


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({"type": "regex", "pattern": "("}, "not a regular expression"),
        ({"type": "telepathy"}, "telepathy"),
        ({"type": "length_limit"}, "max_words"),
        ({"type": "tool_sequence", "tools": []}, "tools"),
    ],
)
def test_a_wrong_built_in_measure_is_refused(spec, sentence):
    with pytest.raises(ValidationError, match=sentence):
        RewardSpec.model_validate({"measure": spec})


def test_names_in_metrics():
    names = [
        RewardSpec.model_validate({"measure": spec}).name
        for spec in ("mine", {"type": "numeric"}, {"type": "tool_called", "tool": "t"})
    ]
    assert names == ["mine", "numeric", "tool_called:t"]
