"""May it run? All that can be known about a job before a GPU is used, beyond what its types say.

In: a requested specification. Out: the effective one with its suite, or every problem by field. Not
here: what the operator allows (app.policy), what exports need (app.exports.checks), and quotas.
"""

import asyncio
from dataclasses import dataclass

from sqlalchemy.ext.asyncio import AsyncSession

from app.db.models import SuiteRow
from app.exceptions import FieldProblem, JobInvalid
from app.exports.checks import export_problems
from app.jobs.admission.measures import bad_rewards, unknown_rewards, unmet_expectations
from app.jobs.admission.model import context_problems, model_problems, target_problems
from app.jobs.admission.suite import (
    as_ollama_shows,
    case_problems,
    case_warnings,
    echo_problems,
    missing_suite,
    unknown_names,
)
from app.policy import AdmissionPolicy
from app.suites import repository as suites
from dressage.measuring.profile import SuiteProfile
from dressage.spec.effective import effective_spec
from dressage.spec.job import Adjustment, JobSpec
from dressage.spec.team import Role


@dataclass(frozen=True)
class AdmittedJob:
    """A specification that passed every check, and the suite it runs on.

    Attributes:
        spec: The effective one.
        adjustments: How it differs from the requested one.
        suite: The version it runs on.
        warnings: What it will not show, or otherwise than may be expected.
        steps: Optimizer steps that are planned.
    """

    spec: JobSpec
    adjustments: tuple[Adjustment, ...]
    suite: SuiteRow
    warnings: tuple[str, ...]
    steps: int


async def admit(
    session: AsyncSession, team: str, requested: JobSpec, policy: AdmissionPolicy, role: Role
) -> AdmittedJob:
    """Check all that can be known before a GPU is used.

    Raises:
        JobInvalid: With every problem found, by field.
    """
    suite = await suites.find(session, team, requested.suite)
    if suite is None:
        raise missing_suite(requested.suite)
    spec, adjustments = effective_spec(requested, suite=f"{suite.name}@{suite.version}")
    spec, left_out = as_ollama_shows(spec, suite)
    adjustments += tuple(left_out)
    profile = SuiteProfile.model_validate(suite.profile) if suite.profile else None
    problems = [
        *unknown_names(spec, suite),
        *unknown_rewards(spec.rewards, suite),
        *(case_problems(spec, profile) if profile else ()),
        *(unmet_expectations(spec.rewards, profile) if profile else ()),
        *echo_problems(spec, suite),
        *bad_rewards(spec.rewards),
        *_needs_gpu(spec),
        *await asyncio.to_thread(
            model_problems,
            spec.agent,
            models_dir=policy.models_dir,
            allowed=policy.allowed_models,
        ),
        *await asyncio.to_thread(context_problems, spec),
        *await asyncio.to_thread(target_problems, spec),
        *policy.priority_problems(spec, role),
        *policy.network_problems(spec),
        *policy.judge_problems(spec.rewards),
        *await export_problems(session, policy, spec, trained=False),
    ]
    if problems:
        raise JobInvalid.of(problems)
    for_training = suite.case_count
    if profile:
        for_training = profile.for_training(spec.evaluation.boundary(profile.places))
    warnings = case_warnings(spec, profile) if profile else []
    return AdmittedJob(spec, adjustments, suite, tuple(warnings), spec.planned_steps(for_training))


def _needs_gpu(spec: JobSpec) -> list[FieldProblem]:
    """What only a GPU can do, asked for without one; and what several cannot do yet."""
    training, gpus = spec.training, spec.resources.gpus
    wanted = {
        "load_in_4bit": ("4-bit training", training.load_in_4bit),
        "vllm": ("vLLM", training.vllm is not None),
    }
    problems = [
        FieldProblem(
            field=f"training.{name}",
            message=f"{what} needs a CUDA GPU; set resources.gpus to 1, or leave it out",
        )
        for name, (what, asked) in wanted.items()
        if asked and gpus == 0
    ]
    if training.vllm is not None and gpus > 1:
        message = f"vLLM writes for one card, and resources.gpus is {gpus}; set it to 1"
        problems.append(FieldProblem(field="training.vllm", message=message))
    return problems
