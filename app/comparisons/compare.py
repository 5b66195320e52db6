"""Pairs of evaluations, case by case."""

from collections.abc import Sequence
from itertools import combinations

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from app.db.base import visible
from app.db.models import JobRow
from app.exceptions import FieldProblem, InvalidRequest, NotFound
from app.jobs import repository
from dressage.intervals import paired_passes, paired_rewards
from dressage.spec.comparison import ComparedEvaluation, ComparedPair, Comparison
from dressage.spec.event import Evaluation, EventType, Gain

FEWEST, MOST = 2, 10


async def of_jobs(
    session: AsyncSession, team: str | None, ids: Sequence[str], evaluation: str | None
) -> Comparison:
    """Every pair of these jobs' evaluations, in the order of the ids.

    Raises:
        NotFound: There is no such job.
        InvalidRequest: Too few or too many, not of one suite version, or without evaluation.
    """
    ids = list(dict.fromkeys(id_.strip() for id_ in ids if id_.strip()))
    if not FEWEST <= len(ids) <= MOST:
        raise _invalid(f"give the ids of {FEWEST} to {MOST} different jobs: jobs=a,b")
    found = await session.scalars(
        select(JobRow).where(JobRow.id.in_(ids), visible(JobRow.team, team))
    )
    jobs = {job.id: job for job in found}
    missing = [id_ for id_ in ids if id_ not in jobs]
    if missing:
        raise NotFound(f"there is no job {missing[0]!r}")
    suites = {jobs[id_].spec["suite"] for id_ in ids}
    if len(suites) > 1:
        each = ", ".join(f"{id_} has {jobs[id_].spec['suite']}" for id_ in ids)
        raise _invalid(f"only evaluations of one suite version can be compared: {each}")
    sides = [(jobs[id_], await _evaluation(session, jobs[id_], evaluation)) for id_ in ids]
    return Comparison(
        items=tuple(_shown(*side) for side in sides),
        pairs=tuple(_pair(*both) for both in combinations(sides, 2)),
    )


async def _evaluation(session: AsyncSession, job: JobRow, name: str | None) -> Evaluation:
    rows = await repository.events(session, job.id, after=0, type_=EventType.EVALUATION)
    known = {row.data["name"]: row.data for row in rows}
    if not known:
        raise _invalid(f"{job.id} has no evaluation yet; it is {job.status}")
    if name is not None and name not in known:
        raise _invalid(
            f"{job.id} has no evaluation {name!r}; it has {', '.join(known)}", field="evaluation"
        )
    return Evaluation.model_validate(known[name or list(known)[-1]])


def _shown(job: JobRow, evaluation: Evaluation) -> ComparedEvaluation:
    return ComparedEvaluation(
        job_id=job.id,
        job_name=job.name,
        suite=job.spec["suite"],
        evaluation=evaluation.name,
        step=evaluation.step,
        count=evaluation.count,
        pass_rate=evaluation.pass_rate,
        mean_reward=evaluation.mean_reward,
    )


def _pair(one: tuple[JobRow, Evaluation], other: tuple[JobRow, Evaluation]) -> ComparedPair:
    (first, before), (second, after) = one, other
    common = before.passed.keys() & after.passed.keys()
    return ComparedPair(
        first=first.id,
        second=second.id,
        pass_rate=Gain.of(paired_passes(before.passed, after.passed)),
        reward=Gain.of(paired_rewards(before.rewards, after.rewards)),
        better=tuple(sorted(c for c in common if after.passed[c] and not before.passed[c])),
        worse=tuple(sorted(c for c in common if before.passed[c] and not after.passed[c])),
        notes=tuple(_notes(first, before, second, after)),
    )


def _notes(first: JobRow, before: Evaluation, second: JobRow, after: Evaluation) -> list[str]:
    notes = []
    if first.spec["rewards"] != second.spec["rewards"]:
        notes.append("they are graded by other measures: regrade one of them by the other's")
    common = len(before.rewards.keys() & after.rewards.keys())
    largest = max(len(before.rewards), len(after.rewards))
    if common < largest:
        notes.append(f"{common} cases are in both, of {largest}")
    if first.spec["evaluation"].get("temperature") != second.spec["evaluation"].get("temperature"):
        notes.append("they were sampled at other temperatures")
    return notes


def _invalid(message: str, *, field: str = "jobs") -> InvalidRequest:
    return InvalidRequest(message, [FieldProblem(field=field, message=message)])
