"""Whether a suite has what a job names, and enough cases for it."""

from app.db.models import SuiteRow
from app.exceptions import FieldProblem, JobInvalid
from app.jobs.admission.measures import listed
from dressage.intervals import FEWEST_PASSES
from dressage.measuring.combine import may_decide
from dressage.measuring.profile import SuiteProfile
from dressage.spec.export import OllamaExport
from dressage.spec.job import Adjustment, JobSpec
from dressage.spec.tool_schema import for_ollama


def missing_suite(reference: str) -> JobInvalid:
    """The refusal when a suite does not exist."""
    message = f"there is no suite {reference!r}"
    return JobInvalid(
        f"suite: {message}; upload it with POST /suites, or `dressage suites push FOLDER`",
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


def case_problems(spec: JobSpec, profile: SuiteProfile) -> list[FieldProblem]:
    """Too few cases for a step, or for choosing weights and proving them."""
    boundary = spec.evaluation.boundary(profile.places)
    for_training, per_step = profile.for_training(boundary), spec.cases_per_step
    problems = []
    if for_training < per_step:
        message = (
            f"a step takes {per_step} cases, but {for_training} of the suite's {profile.cases} are "
            "for training; lower batch_size × gradient_accumulation, resources.gpus or holdout"
        )
        problems.append(FieldProblem(field="training.batch_size", message=message))
    different = sum(place < boundary for place in profile.places)
    if spec.evaluation.every_steps and different < 2:
        message = (
            f"one half of the held-out cases chooses weights and the other half proves them, but "
            f"{different} of the suite's {profile.cases} cases are held out: at least 2 are "
            f"needed, and {2 * FEWEST_PASSES} for an interval; raise holdout, or leave every_steps "
            "out"
        )
        problems.append(FieldProblem(field="evaluation.every_steps", message=message))
    return problems


def case_warnings(spec: JobSpec, profile: SuiteProfile) -> list[str]:
    """What a job on this suite will not show, or shows otherwise than may be expected."""
    boundary = spec.evaluation.boundary(profile.places)
    held_out = profile.cases - profile.for_training(boundary)
    proving = held_out // 2 if spec.evaluation.every_steps else held_out
    warnings = []
    if spec.evaluation.holdout and proving < FEWEST_PASSES:
        warnings.append(
            f"about {proving} held-out cases are left for the proof: an interval of the gain needs "
            f"{FEWEST_PASSES}"
        )
    if not spec.evaluation.holdout and any(export.parity_cases for export in spec.exports):
        warnings.append("without held-out cases no export is compared with what was trained")
    if not may_decide(spec.rewards):
        warnings.append(
            "no reward says when a case is solved (all weights are negative, or success is false): "
            "there is no pass rate, and the gain is that of the reward"
        )
    if spec.agent.instructions and profile.with_system.count:
        warnings.append(
            f"{profile.with_system.count} cases have a system message of their own "
            f"({profile.with_system}): it follows the agent's instructions, in one message"
        )
    if profile.both and any(reward.function for reward in spec.rewards):
        warnings.append(
            f"expect and metadata both have {', '.join(profile.both)}: reward functions get the "
            "one of expect"
        )
    if spec.training.warmup_steps:
        warnings += _warmup(spec, profile.for_training(boundary))
    return warnings


def as_ollama_shows(spec: JobSpec, suite: SuiteRow) -> tuple[JobSpec, list[Adjustment]]:
    """A job that exports to Ollama trains with tools as Ollama shows them, each loss listed."""
    exports = any(isinstance(export, OllamaExport) for export in spec.exports)
    if not exports or spec.agent.tool_schema == "ollama":
        return spec, []
    try:
        tools = spec.agent.tool_schemas(suite.tools, suite.environments)
    except KeyError:  # said by unknown_names
        return spec, []
    adjustments = [
        Adjustment(
            field=f"agent.tools.{tool['name']}.{keyword}",
            requested="shown",
            effective="left out",
            reason="Ollama does not show it to a model, and the job exports there",
        )
        for tool in tools
        for keyword in for_ollama(tool)[1]
    ]
    if not adjustments:
        return spec, []
    agent = spec.agent.model_copy(update={"tool_schema": "ollama"})
    return spec.model_copy(update={"agent": agent}), adjustments


def _warmup(spec: JobSpec, for_training: int) -> list[str]:
    training = spec.training
    steps = spec.planned_steps(for_training)
    if training.lr_scheduler == "constant":
        return ["warmup_steps has no effect with a constant rate; use constant_with_warmup"]
    if training.warmup_steps >= steps:
        return [
            f"the learning rate rises for {training.warmup_steps} steps, and the job has {steps}: "
            "it never reaches learning_rate"
        ]
    return []


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
