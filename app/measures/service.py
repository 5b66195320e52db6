"""Runs measures on rollouts that a request brings along."""

import asyncio
import os
from typing import Any

from app.db.engine import Sessions, unit_of_work
from app.exceptions import FieldProblem, JobInvalid
from app.jobs.admission.measures import bad_rewards, unknown_rewards
from app.jobs.admission.suite import missing_suite
from app.policy import AdmissionPolicy
from app.pools import TeamPool
from app.storage import Storage
from app.suites import repository as suites
from app.suites.service import load
from dressage.authoring.measure import AssistantMessage, MeasureContext, ToolCall
from dressage.authoring.suite import Suite
from dressage.measuring.combine import combined, verdicts_of
from dressage.measuring.session import measuring
from dressage.sandbox.pool import WorkerPool
from dressage.sandbox.process import Outcome, SandboxStartError, Worker
from dressage.spec.preview import MeasurePreview, PreviewResult, PreviewResults, PreviewRollout
from dressage.spec.training import TrainingSpec

TOTAL_SECONDS = 120.0


async def preview(
    sessions: Sessions,
    storage: Storage,
    policy: AdmissionPolicy,
    pool: TeamPool,
    *,
    team: str,
    request: MeasurePreview,
) -> PreviewResults:
    """Verdicts for every rollout.

    Raises:
        JobInvalid: Names, schemas or cases that do not exist, or code that does not load.
    """
    async with unit_of_work(sessions) as session:  # no connection is held while measures run
        row = await suites.find(session, team, request.suite)
    if row is None:
        raise missing_suite(request.suite)
    problems = [
        *unknown_rewards(request.rewards, row),
        *bad_rewards(request.rewards),
        *policy.judge_problems(request.rewards),
    ]
    suite = await asyncio.to_thread(load, storage, row)
    known = {case.id for case in suite.cases}
    environments = [environment["name"] for environment in row.environments]
    if request.environment not in (None, *environments):
        have = ", ".join(environments) or "none"
        message = f"there is no environment {request.environment!r}; the suite has {have}"
        problems.append(FieldProblem(field="environment", message=message))
    problems += [
        FieldProblem(field=f"rollouts.{at}.case_id", message=f"there is no case {r.case_id!r}")
        for at, r in enumerate(request.rollouts)
        if r.case_id is not None and r.case_id not in known
    ]
    if problems:
        raise JobInvalid.of(problems)
    try:
        outcomes = await pool.run(team, lambda: _run(request, suite))
    except SandboxStartError as error:
        message = f"the suite's code does not load: {error}"
        raise JobInvalid(message, [FieldProblem(field="suite", message=message)]) from None
    items = []
    for found in outcomes:
        verdicts = verdicts_of(request.rewards, found)
        reward, passed = combined(request.rewards, verdicts)
        items.append(PreviewResult(reward=reward, passed=passed, verdicts=verdicts))
    return PreviewResults(items=tuple(items))


def _run(request: MeasurePreview, suite: Suite) -> list[list[Outcome]]:
    contexts = [_context(rollout, suite) for rollout in request.rollouts]
    with measuring(
        suite,
        request.rewards,
        timeout=request.timeout,
        seconds=TOTAL_SECONDS,
        judge_key=os.environ.get("DRESSAGE_JUDGE_KEY"),
    ) as (runner, pool):
        workers = [_played(request, pool, context) for context in contexts]
        return runner.run(contexts, workers)


def _played(request: MeasurePreview, pool: WorkerPool, context: MeasureContext) -> Worker | None:
    """An environment after the calls of a rollout.

    Raises:
        JobInvalid: It cannot be reset, or a call fails.
    """
    if request.environment is None:
        return None
    worker = pool.sandbox.start_worker()
    case = {"input": context.input, "expect": context.expect, "metadata": context.metadata}
    limit = TrainingSpec().max_tool_output
    calls: list[dict[str, Any]] = [
        {"call": "open", "name": request.environment, "case": {**case, "seed": 0}}
    ]
    calls += [
        {"call": "tool", "name": call.name, "arguments": call.arguments}
        for call in context.tool_calls
        if call.error is None
    ]
    for call in calls:
        outcome = worker.call({**call, "max_output": limit}, request.timeout)
        if outcome.failure:
            what = call["name"] if call["call"] == "tool" else "reset"
            message = f"{request.environment}.{what}: {outcome.message}"
            raise JobInvalid(message, [FieldProblem(field="environment", message=message)])
    return worker


def _context(rollout: PreviewRollout, suite: Suite) -> MeasureContext:
    given = rollout.model_dump(mode="json")
    case = next((case for case in suite.cases if case.id == rollout.case_id), None)
    if case:
        given |= case.model_dump(mode="json", include={"input", "expect", "metadata"})
    prompt = given["input"]
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return MeasureContext(
        input=prompt,
        expect=given["expect"],
        metadata=given["metadata"],
        messages=given["messages"] or [*turns, {"role": "assistant", "content": rollout.answer}],
        prompt_length=_prompt_length(given["messages"], len(turns)),
        final=AssistantMessage(rollout.answer),
        tool_calls=[ToolCall(**call) for call in given["tool_calls"]],
        stop_reason=rollout.stop_reason,
    )


def _prompt_length(messages: list[dict[str, Any]], turns: int) -> int:
    """How many messages come before the agent's first own turn."""
    first = next((at for at, m in enumerate(messages) if m.get("role") == "assistant"), None)
    return turns if not messages else len(messages) if first is None else max(first, turns)
