"""Whether the rewards of a job can be measured."""

from collections.abc import Iterable, Sequence
from typing import Any

from jsonschema import Draft202012Validator, SchemaError
from jsonschema.validators import validator_for

from app.db.models import SuiteRow
from app.exceptions import FieldProblem
from dressage.spec.measure import JsonSchema, RewardSpec


def unknown_rewards(rewards: Sequence[RewardSpec], suite: SuiteRow) -> list[FieldProblem]:
    """Measures and reward functions that the suite does not have."""
    version = f"{suite.name}@{suite.version}"
    problems = [
        FieldProblem(
            field=f"rewards.{at}.function",
            message=f"there is no reward function {reward.function!r} in {version}; it has "
            f"{listed(suite.reward_functions)}",
        )
        for at, reward in enumerate(rewards)
        if reward.function is not None and reward.function not in suite.reward_functions
    ]
    problems += [
        FieldProblem(
            field=f"rewards.{at}.measure",
            message=f"there is no measure {reward.measure!r} in {version}; it has "
            f"{listed(suite.measures)}",
        )
        for at, reward in enumerate(rewards)
        if isinstance(reward.measure, str) and reward.measure not in suite.measures
    ]
    return problems


def bad_schemas(rewards: Sequence[RewardSpec]) -> list[FieldProblem]:
    """JSON schemas of rewards that are invalid, or that point outside."""
    problems = []
    for at, reward in enumerate(rewards):
        if not isinstance(reward.measure, JsonSchema):
            continue
        schema = reward.measure.json_schema
        try:
            validator_for(schema, default=Draft202012Validator).check_schema(schema)
        except SchemaError as error:
            message = f"not a JSON schema: {error.json_path}: {error.message}"[:500]
            problems.append(FieldProblem(field=f"rewards.{at}.measure.schema", message=message))
        if _refers_elsewhere(schema):
            message = "a $ref must stay inside the schema (#/…)"
            problems.append(FieldProblem(field=f"rewards.{at}.measure.schema", message=message))
    return problems


def _refers_elsewhere(schema: Any) -> bool:
    if isinstance(schema, dict):
        reference = schema.get("$ref", "#")
        outside = isinstance(reference, str) and not reference.startswith("#")
        return outside or any(_refers_elsewhere(value) for value in schema.values())
    return isinstance(schema, list) and any(_refers_elsewhere(value) for value in schema)


def listed(names: Iterable[str]) -> str:
    """Names for a sentence."""
    return ", ".join(names) or "none"
