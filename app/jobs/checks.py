"""What can be known about a job before a GPU is used, beyond what its types say."""

from collections.abc import Sequence
from typing import Any

from jsonschema import Draft202012Validator, SchemaError
from jsonschema.validators import validator_for

from app.db.models import SuiteRow
from app.exceptions import FieldProblem, JobInvalid
from dressage.spec.job import JobSpec
from dressage.spec.measure import JsonSchema, RewardSpec


def missing_suite(reference: str) -> JobInvalid:
    """The refusal when a suite does not exist."""
    message = f"there is no suite {reference!r}"
    return JobInvalid(
        f"suite: {message}; upload it with POST /suites",
        [FieldProblem(field="suite", message=message)],
    )


def unknown_names(spec: JobSpec, suite: SuiteRow) -> list[FieldProblem]:
    """Everything a specification names and the suite does not have."""
    tools = [tool["name"] for tool in suite.tools]
    problems = [
        FieldProblem(
            field=f"agent.tools.{at}",
            message=f"there is no tool {name!r} in {spec.suite}; it has {_listed(tools)}",
        )
        for at, name in enumerate(spec.agent.tools)
        if name not in tools
    ]
    environments = [environment["name"] for environment in suite.environments]
    if spec.agent.environment not in (None, *environments):
        message = (
            f"there is no environment {spec.agent.environment!r} in {spec.suite}; it has "
            f"{_listed(environments)}"
        )
        problems.append(FieldProblem(field="agent.environment", message=message))
    if spec.agent.rollout_func not in (None, *suite.rollout_funcs):
        message = (
            f"there is no rollout_func {spec.agent.rollout_func!r} in {spec.suite}; it has "
            f"{_listed(suite.rollout_funcs)}"
        )
        problems.append(FieldProblem(field="agent.rollout_func", message=message))
    return [*problems, *unknown_rewards(spec.rewards, suite)]


def unknown_rewards(rewards: Sequence[RewardSpec], suite: SuiteRow) -> list[FieldProblem]:
    """Measures and reward functions that the suite does not have."""
    version = f"{suite.name}@{suite.version}"
    problems = [
        FieldProblem(
            field=f"rewards.{at}.function",
            message=f"there is no reward function {reward.function!r} in {version}; it has "
            f"{_listed(suite.reward_functions)}",
        )
        for at, reward in enumerate(rewards)
        if reward.function is not None and reward.function not in suite.reward_functions
    ]
    problems += [
        FieldProblem(
            field=f"rewards.{at}.measure",
            message=f"there is no measure {reward.measure!r} in {version}; it has "
            f"{_listed(suite.measures)}",
        )
        for at, reward in enumerate(rewards)
        if isinstance(reward.measure, str) and reward.measure not in suite.measures
    ]
    return problems


def too_few_cases(spec: JobSpec, case_count: int) -> list[FieldProblem]:
    """A step that takes more cases than there are."""
    for_training = case_count - spec.evaluation.held_out(case_count)
    per_step = spec.cases_per_step
    if for_training >= per_step:
        return []
    return [
        FieldProblem(
            field="training.batch_size",
            message=f"a step takes {per_step} cases, but {for_training} of the suite's "
            f"{case_count} are for training; lower batch_size × gradient_accumulation, "
            "resources.gpus or holdout",
        )
    ]


def bad_schemas(rewards: Sequence[RewardSpec]) -> list[FieldProblem]:
    """JSON schemas of rewards that are none, or that point outside."""
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


def echo_problems(spec: JobSpec, suite: SuiteRow) -> list[FieldProblem]:
    """ECHO without anything that answers, or with weights for tools that are not there."""
    echo, agent = spec.training.echo, spec.agent
    if echo is None:
        return []
    tools = list(agent.tools)
    for environment in suite.environments:
        if environment["name"] == agent.environment:
            tools = [tool["name"] for tool in environment["tools"]]
    problems = [
        FieldProblem(
            field=f"training.echo.tool_weights.{name}",
            message=f"the agent has no tool {name!r}; it has {_listed(tools)}",
        )
        for name in echo.tool_weights
        if name not in tools
    ]
    if echo.coeff > 0 and not tools and not agent.environment and not agent.rollout_func:
        message = "ECHO predicts what tools answer, but the agent has none; leave training.echo out"
        problems.append(FieldProblem(field="training.echo", message=message))
    return problems


def needs_gpu(spec: JobSpec) -> list[FieldProblem]:
    """What only a GPU can do, asked for without one."""
    if spec.training.load_in_4bit and spec.resources.gpus == 0:
        message = "4-bit training needs a CUDA GPU; set resources.gpus to 1, or leave it out"
        return [FieldProblem(field="training.load_in_4bit", message=message)]
    return []


def _listed(names: list[str]) -> str:
    return ", ".join(names) if names else "none"
