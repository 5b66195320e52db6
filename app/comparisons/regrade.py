"""Stored rollouts under other measures, in the sandbox of the service: no GPU is used."""

import asyncio
import os
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from app.db.engine import Sessions, unit_of_work
from app.db.models import JobRow, SuiteRow
from app.exceptions import FieldProblem, JobInvalid
from app.jobs import repository
from app.jobs.admission.measures import bad_rewards, unknown_rewards
from app.jobs.admission.suite import missing_suite
from app.policy import AdmissionPolicy
from app.pools import TeamPool
from app.storage import Storage
from app.suites import repository as suites
from app.suites.service import load
from dressage.authoring.measure import AssistantMessage, MeasureContext, ToolCall
from dressage.authoring.suite import Suite
from dressage.intervals import paired_passes, paired_rewards
from dressage.measuring.advantages import advantages_of, has_no_spread
from dressage.measuring.combine import combined, may_decide, verdicts_of
from dressage.measuring.conversation import final_text
from dressage.measuring.session import measuring
from dressage.sandbox.process import Outcome, SandboxStartError
from dressage.spec.comparison import (
    Regrade,
    RegradedPhase,
    RegradedRollout,
    RegradeSpec,
)
from dressage.spec.event import Gain, Rollout
from dressage.spec.job import JobSpec
from dressage.spec.suite import Case

TOTAL_SECONDS = 120.0
TRAIN = "train"
BEFORE, AFTER = "before", "after"


async def of_job(
    sessions: Sessions,
    storage: Storage,
    policy: AdmissionPolicy,
    pool: TeamPool,
    *,
    team: str,
    job: JobRow,
    request: RegradeSpec,
) -> Regrade:
    """What the measures say of the rollouts that the job has stored.

    Raises:
        JobInvalid: Names or schemas that do not exist, a job with an environment, code that does
            not load, or no such rollouts.
    """
    spec = JobSpec.model_validate(job.spec)
    async with unit_of_work(sessions) as session:  # no connection is held while measures run
        row = await suites.find(session, job.team, request.suite or spec.suite)
        stored = {
            phase: [
                repository.rollout_of(found)
                for found in await repository.rollouts(
                    session, job.id, phase=phase, after=0, limit=request.limit
                )
            ]
            for phase in dict.fromkeys(request.phases)
        }
    if row is None:
        raise missing_suite(request.suite or spec.suite)
    _require(spec, row, stored, policy, request)
    suite = await asyncio.to_thread(load, storage, row)
    cases = {case.id: case for case in suite.cases}
    rollouts = [one for phase in stored.values() for one in phase]
    gradable = [one for one in rollouts if one.whole and one.case_id in cases and not one.error]
    notes = _notes(spec, row, rollouts, gradable)
    if not gradable:
        raise _invalid("phases", "none of these rollouts is stored whole, of a case of the suite")
    contexts = [_context(one, cases[one.case_id], spec.agent.instructions) for one in gradable]
    if unsure := sum(any(map(_may_have_failed, context.tool_calls)) for context in contexts):
        notes.append(
            f"{unsure} of {len(contexts)} rollouts have calls that may have failed or were not "
            "run: only messages are stored, so measures see the text as `result`, never `error`"
        )
    try:
        outcomes = await pool.run(team, lambda: _graded(request, suite, contexts))
    except SandboxStartError as error:
        raise _invalid("suite", f"the suite's code does not load: {error}") from None
    graded = [_shown(one, request, found) for one, found in zip(gradable, outcomes, strict=True)]
    graded = _with_advantages(graded, spec)
    by_phase = {phase: [one for one in graded if one.phase == phase] for phase in stored}
    decided = bool(may_decide(request.rewards))
    gains: tuple[Gain | None, Gain | None] = (None, None)
    if by_phase.get(BEFORE) and by_phase.get(AFTER):
        before, after = _by_case(by_phase[BEFORE]), _by_case(by_phase[AFTER])
        gains = (
            Gain.of(paired_passes(_passed(before), _passed(after))) if decided else None,
            Gain.of(paired_rewards(_rewards(before), _rewards(after))),
        )
    return Regrade(
        items=tuple(graded),
        phases=tuple(_phase(name, found, decided=decided) for name, found in by_phase.items()),
        gain=gains[0],
        reward_gain=gains[1],
        notes=tuple(notes),
    )


def _require(
    spec: JobSpec,
    row: SuiteRow,
    stored: dict[str, list[Rollout]],
    policy: AdmissionPolicy,
    request: RegradeSpec,
) -> None:
    problems = [
        *unknown_rewards(request.rewards, row),
        *bad_rewards(request.rewards),
        *policy.judge_problems(request.rewards),
    ]
    if row.name != spec.suite.partition("@")[0]:
        message = f"the job ran on {spec.suite}; give another version of it"
        problems.append(FieldProblem(field="suite", message=message))
    if spec.agent.environment is not None:
        message = "an environment is gone when its rollout has ended: what it was cannot be asked"
        problems.append(FieldProblem(field="rewards", message=message))
    problems += [
        FieldProblem(field="phases", message=f"the job has no rollouts of {phase!r}")
        for phase, found in stored.items()
        if not found
    ]
    if problems:
        raise JobInvalid.of(problems)


def _notes(
    spec: JobSpec, row: SuiteRow, rollouts: Sequence[Rollout], gradable: Sequence[Rollout]
) -> list[str]:
    notes = []
    if len(gradable) < len(rollouts):
        notes.append(
            f"{len(rollouts) - len(gradable)} of {len(rollouts)} rollouts are left out: they are "
            "not stored whole, their environment was lost, or the suite has their case no longer"
        )
    if spec.suite != f"{row.name}@{row.version}":
        notes.append(f"cases and measures are those of {row.name}@{row.version}")
    return notes


def _context(rollout: Rollout, case: Case, instructions: str | None) -> MeasureContext:
    content = case.model_dump(mode="json")
    messages: list[Any] = [dict(message) for message in rollout.messages]
    length = len(case.conversation(instructions))
    said = messages[length:]
    return MeasureContext(
        input=content["input"],
        expect=content["expect"],
        metadata=content["metadata"],
        messages=messages,
        final=AssistantMessage(final_text(said)),
        tool_calls=_calls(said),
        stop_reason=rollout.stop_reason,
        prompt_length=length,
    )


def _calls(messages: Sequence[Any]) -> list[ToolCall]:
    """Calls with their results: a turn's results come in the order of its calls."""
    results = iter([message for message in messages if message.get("role") == "tool"])
    found = []
    for message in messages:
        for call in message.get("tool_calls") or []:
            function = call["function"]
            arguments = function.get("arguments")
            answer = next(results, None)
            said = None if answer is None else str(answer.get("content") or "")
            found.append(
                ToolCall(
                    function["name"], arguments if isinstance(arguments, dict) else {}, said, None
                )
            )
    return found


def _may_have_failed(call: ToolCall) -> bool:
    """The model is shown errors as `{"error": …}`; a tool may answer that, too."""
    return call.result is None or call.result.startswith('{"error": ')


def _graded(
    request: RegradeSpec, suite: Suite, contexts: list[MeasureContext]
) -> list[list[Outcome]]:
    with measuring(
        suite,
        request.rewards,
        timeout=request.timeout,
        seconds=TOTAL_SECONDS,
        judge_key=os.environ.get("DRESSAGE_JUDGE_KEY"),
    ) as (runner, _):
        return runner.run(contexts, [None] * len(contexts))


def _shown(rollout: Rollout, request: RegradeSpec, outcomes: list[Outcome]) -> RegradedRollout:
    verdicts = verdicts_of(request.rewards, outcomes)
    reward, passed = combined(request.rewards, verdicts)
    return RegradedRollout(
        id=rollout.id,
        phase=rollout.phase,
        step=rollout.step,
        case_id=rollout.case_id,
        index=rollout.index,
        reward_before=rollout.reward,
        reward=reward,
        passed=passed,
        advantage_before=rollout.advantage,
        advantage=None,
        verdicts=verdicts,
    )


def _with_advantages(graded: list[RegradedRollout], spec: JobSpec) -> list[RegradedRollout]:
    """Advantages of training rollouts whose whole group is there, as the trainer makes them."""
    scale = spec.training.scale_rewards
    by_step: dict[int, list[list[RegradedRollout]]] = defaultdict(list)
    for group in _groups(graded):
        if len(group) == spec.training.num_generations:
            by_step[group[0].step].append(group)
    found: dict[str, float] = {}
    for groups in by_step.values():
        rewards = [[one.reward for one in group] for group in groups]
        advantages = iter(advantages_of(rewards, scale, everyone=rewards))
        found |= {one.id: next(advantages) for group in groups for one in group}
    return [one.model_copy(update={"advantage": found.get(one.id)}) for one in graded]


def _groups(graded: Sequence[RegradedRollout]) -> list[list[RegradedRollout]]:
    groups: dict[tuple[int, str], list[RegradedRollout]] = defaultdict(list)
    for one in graded:
        if one.phase == TRAIN:
            groups[one.step, one.case_id].append(one)
    return list(groups.values())


def _phase(name: str, graded: Sequence[RegradedRollout], *, decided: bool) -> RegradedPhase:
    whole = [g for g in _groups(graded) if all(one.advantage is not None for one in g)]
    known = [one.reward for one in graded if one.reward is not None]
    earlier = [one.reward_before for one in graded if one.reward_before is not None]
    scored = [one for one in graded if one.reward is not None]
    return RegradedPhase(
        phase=name,
        rollouts=len(graded),
        changed=sum(one.reward != one.reward_before for one in graded),
        mean_reward_before=fmean(earlier) if earlier else None,
        mean_reward=fmean(known) if known else None,
        pass_rate=fmean(one.passed for one in scored) if decided and scored else None,
        groups=len(whole),
        groups_with_spread_before=sum(_spread([o.reward_before for o in g]) for g in whole),
        groups_with_spread=sum(_spread([one.reward for one in g]) for g in whole),
        turned=sum(
            (one.advantage or 0.0) * (one.advantage_before or 0.0) < 0
            for group in whole
            for one in group
        ),
    )


def _spread(rewards: Sequence[float | None]) -> bool:
    return None not in rewards and not has_no_spread(rewards)


def _by_case(graded: Sequence[RegradedRollout]) -> dict[str, RegradedRollout]:
    return {one.case_id: one for one in graded if one.reward is not None}


def _passed(graded: dict[str, RegradedRollout]) -> dict[str, bool]:
    return {case: one.passed for case, one in graded.items()}


def _rewards(graded: dict[str, RegradedRollout]) -> dict[str, float]:
    return {case: one.reward or 0.0 for case, one in graded.items()}


def _invalid(field: str, message: str) -> JobInvalid:
    return JobInvalid(message, [FieldProblem(field=field, message=message)])
