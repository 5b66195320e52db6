"""Built-in measures that users make harmful: refused at the door, or ended in their sandbox."""

import pytest

from app.jobs.admission.measures import pattern_problem, schema_problem
from dressage.sandbox.patterns import compile_pattern

DOUBLING = {
    "$defs": {
        f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"$ref": f"#/$defs/d{n + 1}"}]}
        for n in range(40)
    }
    | {"d40": {"type": "object"}},
    "$ref": "#/$defs/d0",
}


def deep(levels):
    schema = {}
    for _ in range(levels):
        schema = {"not": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"$ref": "#"}, "leads back to itself"),
        ({"allOf": [{"$ref": "#"}]}, "leads back to itself"),
        (
            {
                "$ref": "#/$defs/a",
                "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
            },
            "leads back to itself",
        ),
        ({"$ref": "#/nope"}, "'/nope' is not in the schema"),
        ({"$ref": "http://127.0.0.1/x"}, "must stay inside"),
        ({"$dynamicRef": "http://127.0.0.1/x"}, "must stay inside"),
        ({"$dynamicRef": "file:///etc/passwd"}, "must stay inside"),
        (
            {
                "$schema": "https://json-schema.org/draft/2019-09/schema",
                "items": {"$recursiveRef": "file:///etc/passwd"},
            },
            "must stay inside",
        ),
        ({"properties": {"a": {"pattern": "("}}}, "is not a 'regex'"),
        ({"type": 5}, "$.type"),
        (deep(3000), "too deeply"),
    ],
)
def test_schemas_that_cannot_work_are_refused_with_the_reason(schema, problem):
    assert problem in schema_problem(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"properties": {"child": {"$ref": "#"}}},
        {"$ref": "#/$defs/n", "$defs": {"n": {"items": {"$ref": "#/$defs/n"}}}},
        {"const": {"$ref": "http://not-a-reference"}},
        DOUBLING,
    ],
)
def test_schemas_that_work_pass(schema):
    assert schema_problem(schema) is None


@pytest.mark.parametrize(
    ("pattern", "text", "found"),
    [
        ("key={d", "key={d", True),
        ("(?:yes){e<=3}", "no", False),
        ("(?:yes){e<=3}", "yes{e<=3}", True),
        ("a{2}b{1,}c{,2}", "aabcc", True),
        (r"[{]\{{}", "{{{}", True),
        ("x{,}y", "xxxy", True),
    ],
)
def test_patterns_mean_what_they_mean_for_python(pattern, text, found):
    assert bool(compile_pattern(pattern).search(text)) is found


@pytest.mark.parametrize("pattern", ["(", r"\p{Lu}", "(?V1)x", "(?e)x", "(" * 5000 + ")" * 5000])
def test_patterns_that_are_none_are_refused(pattern):
    assert pattern_problem(pattern)


def preview(api, suite, measure, answer):
    return api.post(
        "/measures/preview",
        json={
            "suite": suite,
            "rewards": [{"measure": measure}],
            "rollouts": [{"answer": answer}],
            "timeout": 2,
        },
    )


@pytest.fixture
def suite(api):
    content = (
        b'{"input": "q", "expect": {"answer": "x"}}\n{"input": "r", "expect": {"answer": "x"}}'
    )
    answer = api.post("/suites?name=plain", content=content)
    assert answer.status_code == 201
    return "plain"


def test_a_pattern_without_end_is_ended_and_named(api, suite):
    measure = {"type": "json_schema", "schema": {"pattern": "^(a+)+$"}}
    (item,) = preview(api, suite, measure, '"' + "a" * 60 + '!"').json()["items"]
    assert item["verdicts"][0]["error"] == "timed_out"
    assert item["reward"] is None


def test_what_a_schema_points_to_is_never_fetched(api, suite, tmp_path):
    secret = tmp_path / "secret.json"
    secret.write_text('{"const": "s3cr3t"}')
    for keyword in ("$ref", "$dynamicRef"):
        measure = {"type": "json_schema", "schema": {keyword: f"file://{secret}"}}
        answer = preview(api, suite, measure, '"x"')
        assert answer.status_code == 422
        assert "s3cr3t" not in answer.text
