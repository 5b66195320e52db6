"""Whether a suite has what a job names, and enough cases for it."""

from app.db.models import SuiteRow
from app.exceptions import FieldProblem, JobInvalid
from app.jobs.admission.measures import listed
from dressage.spec.job import JobSpec


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
            message=f"there is no tool {name!r} in {spec.suite}; it has {listed(tools)}",
        )
        for at, name in enumerate(spec.agent.tools)
        if name not in tools
    ]
    environments = [environment["name"] for environment in suite.environments]
    if spec.agent.environment not in (None, *environments):
        message = (
            f"there is no environment {spec.agent.environment!r} in {spec.suite}; it has "
            f"{listed(environments)}"
        )
        problems.append(FieldProblem(field="agent.environment", message=message))
    if spec.agent.rollout_func not in (None, *suite.rollout_funcs):
        message = (
            f"there is no rollout_func {spec.agent.rollout_func!r} in {spec.suite}; it has "
            f"{listed(suite.rollout_funcs)}"
        )
        problems.append(FieldProblem(field="agent.rollout_func", message=message))
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
            message=f"the agent has no tool {name!r}; it has {listed(tools)}",
        )
        for name in echo.tool_weights
        if name not in tools
    ]
    if echo.coeff > 0 and not tools and not agent.environment and not agent.rollout_func:
        message = "ECHO predicts what tools answer, but the agent has none; leave training.echo out"
        problems.append(FieldProblem(field="training.echo", message=message))
    return problems
