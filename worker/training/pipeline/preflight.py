"""Before training: can this job learn anything, does it fit, how long will it take.

k rollouts of the base model on a sample of cases, one trial update, and null agents against the
measures.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

from dressage.measuring.advantages import has_no_spread
from dressage.measuring.combine import may_decide
from dressage.seeds import derived_seed
from dressage.spec.event import EventType
from dressage.spec.job import JobSpec
from dressage.spec.preflight import MemoryEstimate, PreflightReport, TimeEstimate
from dressage.spec.status import Reason
from dressage.spec.suite import Case
from worker.training.pipeline.null_agents import hacked_measures, play_null_agents
from worker.training.pipeline.parts import Parts
from worker.training.process.failures import RunFailure
from worker.training.rewards.record import rollout_record
from worker.training.rewards.weighted import ScoredRollout, grouped
from worker.training.sampler.protocol import Draws
from worker.wire.run_dir import RunDirectory

NAME = "preflight"
FEW_MIXED, MANY_TRUNCATED, MANY_TOOL_ERRORS = 0.1, 0.2, 0.5
ALL_TRUNCATED = 0.9
ENOUGH_GROUPS = 4


@dataclass(frozen=True)
class Timing:
    """Seconds of one rollout and of one micro-batch's update."""

    rollout: float
    update: float


def preflight(
    run: RunDirectory, job: JobSpec, parts: Parts, cases: Sequence[Case]
) -> PreflightReport:
    """Look before training starts. The model's weights and the random state are left alone.

    Raises:
        RunFailure: One update does not fit into memory.
    """
    sample = sorted(cases, key=lambda case: derived_seed(job.training.seed, NAME, case.id))
    sample = sample[: job.preflight.cases]
    started = time.monotonic()
    scored = _play(job, parts, sample)
    rollout_seconds = (time.monotonic() - started) / len(scored)
    for one in scored:
        run.emit(EventType.ROLLOUT, **rollout_record(one, NAME, 0))
    started = time.monotonic()
    longest = max(parts.longest_prompt, *(len(one.rollout.prompt_ids) for one in scored))
    peak = parts.trainer.trial_update([one.rollout for one in scored], longest)
    timing = Timing(rollout_seconds, time.monotonic() - started)
    agents = play_null_agents(job, parts, sample, [one.rollout for one in scored])
    hacked = hacked_measures(job, agents, scored)
    report = _report(job, parts, scored, peak, timing).model_copy(
        update={"null_agents": agents, "hackable_measures": tuple(hacked)}
    )
    verdict, reasons = judged(report, job, failures_of(scored))
    report = report.model_copy(update={"verdict": verdict, "reasons": (*reasons, *hacked.values())})
    if hacked and report.verdict == "go":
        report = report.model_copy(update={"verdict": "warn"})
    for sentence in hacked.values():
        run.emit(EventType.WARNING, code="hackable_measure", message=sentence)
    return report


def _play(job: JobSpec, parts: Parts, sample: Sequence[Case]) -> list[ScoredRollout]:
    """A whole group for every case, as many side by side as in training."""
    training = job.training
    pairs = [(case, index) for case in sample for index in range(training.num_generations)]
    sampling = parts.trainer.rollouts.sampling(training.temperature)
    draws = Draws(sampling, derived_seed(training.seed, NAME))
    scored: list[ScoredRollout] = []
    for batch in grouped(pairs, training.rollouts_per_step):
        scored += parts.trainer.play(batch, draws)
    return scored


def _report(
    job: JobSpec, parts: Parts, scored: Sequence[ScoredRollout], peak: int, timing: Timing
) -> PreflightReport:
    training = job.training
    size = training.num_generations
    groups = grouped(scored, size)
    rewards = [one.reward for one in scored if one.reward is not None]
    decided = bool(may_decide(job.rewards))
    rollouts = [one.rollout for one in scored]
    calls = sum(len(rollout.tool_calls) for rollout in rollouts)
    seconds = (
        training.rollouts_per_step * timing.rollout + training.gradient_accumulation * timing.update
    )
    steps = parts.trainer.planned_steps
    return PreflightReport(
        verdict="go",
        reasons=(),
        cases=len(groups),
        group_size=size,
        pass_at_1=fmean(one.passed for one in scored) if decided else None,
        pass_at_k=fmean(any(one.passed for one in group) for group in groups) if decided else None,
        mean_reward=fmean(rewards) if rewards else None,
        mixed_groups=fmean(_is_mixed(group) for group in groups),
        unscored=1 - len(rewards) / len(scored),
        truncated=fmean(rollout.truncated for rollout in rollouts),
        tool_errors=sum(e.tool_failures for e in rollouts) / calls if calls else 0.0,
        tool_calls=calls / len(rollouts),
        completion_tokens=fmean(len(rollout.completion_ids) for rollout in rollouts),
        memory=_memory(job, parts, peak),
        time=TimeEstimate(
            seconds_per_step=seconds,
            steps=steps,
            hours=seconds * steps / 3600,
            gpu_hours=seconds * steps / 3600 * job.resources.gpus,
        ),
        null_agents=(),
        hackable_measures=(),
    )


def _is_mixed(group: Sequence[ScoredRollout]) -> bool:
    known = [one.reward for one in group if one.reward is not None]
    return bool(known) and not has_no_spread(known)


def _memory(job: JobSpec, parts: Parts, peak: int) -> MemoryEstimate:
    needed = peak + parts.trainer.optimizer_bytes
    device = parts.trainer.accelerator.device
    if device.type == "cuda":
        available = torch.cuda.get_device_properties(device).total_memory
        name = torch.cuda.get_device_name(device)
        vllm = job.training.vllm
        if vllm and not vllm.sleep:
            needed += int(vllm.gpu_memory_utilization * available)
    else:
        with open("/proc/meminfo") as file:
            available = int(file.readline().split()[1]) * 1024
        name = "cpu"
    return MemoryEstimate(device=name, peak_bytes=needed, available_bytes=available)


@dataclass(frozen=True)
class Failures:
    """What fails most: a measure, a tool, each with its own words; empty where none does."""

    measure: str = ""
    tool: str = ""


def failures_of(scored: Sequence[ScoredRollout]) -> Failures:
    """The measure and the tool that fail most often, and what they say then."""
    measures = Counter(
        (verdict.measure, verdict.reason)
        for one in scored
        for verdict in one.verdicts
        if verdict.error
    )
    tools = Counter(
        (call.name, call.error)
        for one in scored
        for call in one.rollout.tool_calls
        if call.error is not None
    )
    return Failures(*(_most_often(counted) for counted in (measures, tools)))


def _most_often(counted: "Counter[tuple[str, str]]") -> str:
    if not counted:
        return ""
    ((name, said), _), *_ = counted.most_common(1)
    return f": {name!r} most often ({said[:200]})"


def judged(
    report: PreflightReport, job: JobSpec, failures: Failures | None = None
) -> tuple[str, list[str]]:
    """Go, warn or stop, with a sentence for each reason."""
    failures = failures or Failures()
    stops, warnings = [], []
    if report.mixed_groups == 0 and report.cases >= ENOUGH_GROUPS:
        which = {1.0: " (every rollout passes)", 0.0: " (no rollout passes)"}
        passes = which.get(report.pass_at_1, "") if report.pass_at_1 is not None else ""
        stops.append(
            f"none of {report.cases} groups has a spread of rewards{passes}: there is nothing to "
            "learn from; change the cases, the measures, or the temperature"
        )
    elif report.mixed_groups < FEW_MIXED:
        warnings.append(
            f"only {report.mixed_groups:.0%} of the groups have a spread of rewards; the rest "
            "teach nothing. More generations per case help, or training.resample_dead_groups"
        )
    if report.truncated >= ALL_TRUNCATED and job.training.mask_truncated_completions:
        stops.append(
            f"{report.truncated:.0%} of the rollouts are cut at max_completion_length "
            f"{job.training.max_completion_length} and would be masked; raise it"
        )
    elif report.truncated > MANY_TRUNCATED:
        warnings.append(f"{report.truncated:.0%} of the rollouts are cut; raise the length")
    if report.unscored:
        share = f"a measure fails on {report.unscored:.0%} of the rollouts"
        warnings.append(share + failures.measure)
    if report.tool_errors > MANY_TOOL_ERRORS:
        warnings.append(f"{report.tool_errors:.0%} of the tool calls fail{failures.tool}")
    if (job.agent.tools or job.agent.environment) and report.tool_calls == 0:
        warnings.append("the base model calls no tool at all")
    if report.memory.peak_bytes > report.memory.available_bytes:
        warnings.append("one update with its optimizer needs more memory than there is")
    return ("stop" if stops else "warn" if warnings else "go"), [*stops, *warnings]


def refuse(report: PreflightReport) -> RunFailure:
    """The end of a run that cannot learn."""
    sentences = "; ".join(report.reasons)
    return RunFailure(
        Reason.NO_LEARNING_SIGNAL, f"pre-flight says stop: {sentences}. Resume to train anyway"
    )
