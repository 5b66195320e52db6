"""Ask a trained agent: a follow-up task like an export, whose result is an answer."""

import asyncio
import time

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.broker.wake import PendingWakes
from app.db.base import new_id, visible
from app.db.engine import Sessions, unit_of_work
from app.db.models import ExportRow, JobRow, SuiteRow
from app.exceptions import FieldProblem, JobInvalid, NotFound
from app.exports.checks import require_trained
from app.policy import AdmissionPolicy
from app.storage import Storage
from app.suites.service import load
from app.teams import quotas
from dressage.spec.generation import Generation, GenerationSpec
from dressage.spec.job import JobSpec
from dressage.spec.status import EXPORT_TERMINAL, AttemptKind, ExportStatus

POLL_SECONDS = 0.2


async def submit(
    session: AsyncSession,
    wakes: PendingWakes,
    storage: Storage,
    policy: AdmissionPolicy,
    job: JobRow,
    request: GenerationSpec,
) -> ExportRow:
    """Queue a question to a finished job's agent.

    Raises:
        JobNotTrained: It has no trained model (yet).
        JobInvalid: Tools or a case that are not there.
        QuotaExceeded: Too many questions and exports wait.
    """
    spec = JobSpec.model_validate(job.spec)
    await require_trained(session, job, None)
    if spec.agent.rollout_func:
        message = (
            f"rollouts of this job are played by {spec.agent.rollout_func!r}, a function of its "
            "suite; an ordinary chat is not what was trained. Export the model, and ask it there"
        )
        raise JobInvalid.of([FieldProblem(field="agent.rollout_func", message=message)])
    problems = await _problems(session, storage, job, spec, request)
    if problems:
        raise JobInvalid.of(problems)
    await quotas.require_task(session, job.team, limit=policy.max_waiting_tasks)
    identity = new_id("generation")
    row = ExportRow(
        id=identity,
        kind=AttemptKind.GENERATION,
        job_id=job.id,
        name=identity,
        spec={"type": "generation", "request": request.model_dump(mode="json")},
        status=ExportStatus.QUEUED,
    )
    session.add(row)
    await session.flush()
    await session.refresh(row)
    wakes.exports()
    return row


async def find(
    session: AsyncSession, team: str | None, job_id: str, generation_id: str
) -> ExportRow:
    """One generation of a team's job.

    Raises:
        NotFound: There is no such generation.
    """
    row: ExportRow | None = await session.scalar(
        select(ExportRow)
        .join(JobRow, JobRow.id == ExportRow.job_id)
        .where(
            ExportRow.id == generation_id,
            ExportRow.job_id == job_id,
            visible(JobRow.team, team),
            ExportRow.kind == AttemptKind.GENERATION,
        )
    )
    if row is None:
        raise NotFound(f"there is no generation {generation_id!r}")
    return row


async def wait_for(
    sessions: Sessions, team: str | None, job_id: str, generation_id: str, seconds: float
) -> Generation:
    """The generation once it has ended, or as it is when the time is over."""
    deadline = time.monotonic() + seconds
    while True:
        async with unit_of_work(sessions) as session:
            shown = Generation.model_validate(await find(session, team, job_id, generation_id))
        if shown.status in EXPORT_TERMINAL or time.monotonic() >= deadline:
            return shown
        await asyncio.sleep(POLL_SECONDS)


async def _problems(
    session: AsyncSession,
    storage: Storage,
    job: JobRow,
    spec: JobSpec,
    request: GenerationSpec,
) -> list[FieldProblem]:
    suite = await session.get_one(SuiteRow, job.suite_id)
    known = [tool["name"] for tool in suite.tools]
    problems = [
        FieldProblem(field=f"tools.{at}", message=f"there is no tool {name!r} in {spec.suite}")
        for at, name in enumerate(request.tools or ())
        if name not in known
    ]
    if request.case_id is not None:
        cases = (await asyncio.to_thread(load, storage, suite)).cases
        if all(case.id != request.case_id for case in cases):
            message = f"there is no case {request.case_id!r} in {spec.suite}"
            problems.append(FieldProblem(field="case_id", message=message))
    elif spec.agent.environment and request.tools is None:
        message = "the agent lives in an environment, which is made for a case: give case_id"
        problems.append(FieldProblem(field="case_id", message=message))
    return problems
