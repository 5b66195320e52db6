"""Runs a job from its directory to its manifest."""

import datetime
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dressage.authoring.suite import Suite
from dressage.sandbox.pool import WorkerPool
from dressage.spec.artifact import ArtifactKind
from dressage.spec.event import EventType
from dressage.spec.job import JobSpec
from dressage.spec.preflight import PreflightReport
from dressage.spec.status import JobStatus, Reason
from dressage.spec.suite import Case
from worker.training.evaluate import divided, gained
from worker.training.pipeline.build import build
from worker.training.pipeline.held_out import AFTER, AT_ONCE, BEFORE, HeldOut
from worker.training.pipeline.parts import Parts
from worker.training.pipeline.preflight import preflight, refuse
from worker.training.pipeline.pulse import Pulse
from worker.training.process.failures import RunFailure
from worker.training.process.user_code import user_code
from worker.training.rollout.engine import RolloutEngine
from worker.training.update import ranks
from worker.training.update.best import BestWeights
from worker.training.update.callbacks import EverySteps
from worker.training.update.config import TENSORBOARD
from worker.wire.checkpoints import newest_complete
from worker.wire.run_dir import (
    SUITE,
    TOOLS,
    Manifest,
    ProducedFile,
    RunDirectory,
    RunSpec,
    write_whole,
)

log = logging.getLogger(__name__)

MANY_CALLS = 256  # at the same time; many of them wait for something
PREFLIGHT, DATE = "preflight.json", "date.txt"


def run_job(run: RunDirectory) -> None:
    """Run a job from its directory to its manifest.

    Raises:
        RunFailure: For everything that has a reason the user can act on.
    """
    spec = run.spec()
    run.emit(EventType.STATUS, status=JobStatus.PREPARING)
    suite = Suite.from_path(run.path / SUITE)
    at_once = max(spec.job.training.rollouts_per_step, AT_ONCE)
    with user_code(
        suite,
        network=spec.job.resources.network,
        size=min(at_once, MANY_CALLS),
        workers=at_once,
    ) as pool:
        _run(run, spec, suite, pool)


def _run(run: RunDirectory, spec: RunSpec, suite: Suite, pool: WorkerPool) -> None:
    job, previous = spec.job, tuple(Path(path) for path in spec.previous)
    today = _date(run, previous)
    parts = build(run, job, pool, suite.cases, date=today)
    parts.engine.tell(Pulse(run).beat)
    try:
        _prove_and_train(run, spec, parts, previous, today)
    finally:
        parts.trainer.close()


def _prove_and_train(
    run: RunDirectory,
    spec: RunSpec,
    parts: Parts,
    previous: tuple[Path, ...],
    today: datetime.date,
) -> None:
    job = spec.job
    report = _looked_before(run, job, parts, previous)
    if job.preflight.only:
        run.emit(EventType.STATUS, status=JobStatus.EVALUATING)
        run.finish(Manifest(files=(), result={"preflight": report and report.model_dump()}))
        return
    choosing, proof = divided(parts.held_out, job.evaluation)
    evaluation = HeldOut(run, job, parts, previous)
    if job.evaluation.only:
        run.emit(EventType.STATUS, status=JobStatus.EVALUATING)
        evaluation.at(BEFORE, proof, step=0)
        run.finish(Manifest(files=(), result=_measured(job, parts)))
        ranks.wait_for_all()
        return
    if proof:
        evaluation.at(BEFORE, proof, step=0)

    if ranks.any_of(run.pause_requested):
        raise RunFailure(
            Reason.PAUSED_BY_USER, "paused on request before its first step; resume to start"
        )
    run.emit(EventType.STATUS, status=JobStatus.TRAINING)
    checkpoint = newest_complete(previous, up_to=spec.up_to_step)
    if checkpoint:
        log.info("continuing from %s", checkpoint.name)
        if parts.trainer.echo:
            parts.trainer.echo.restore(checkpoint)
    best = BestWeights(run.path / "best", [path / "best" for path in previous])
    if job.evaluation.every_steps:
        choose = _chooser(job, parts, evaluation, choosing, best)
        parts.trainer.add_callback(EverySteps(job.evaluation.every_steps, choose))
    parts.trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)

    paused = parts.trainer.paused()
    if paused:
        raise paused
    run.emit(EventType.STATUS, status=JobStatus.EVALUATING)
    step = parts.trainer.state.global_step
    if best.step is not None:
        best.restore(parts.trainer.model)
        log.info(
            "keeping the weights of step %d, the best of %d on held-out cases", best.step, step
        )
        step = best.step
    moved = parts.trainer.moved_share
    if job.training.lora is None:  # what is proved is what is stored
        parts.trainer.round_to(getattr(torch, job.training.dtype))
    if proof:
        evaluation.at(AFTER, proof, step=step)

    if ranks.rank():
        ranks.wait_for_all()  # an end of one process would end the others
        return
    saved = save(run, job, parts)
    result = _result(job, parts, evaluation, saved, best, today, moved)
    _warn_of_loss(run, result)
    if report:
        result["preflight"] = report.model_dump(mode="json")
    files = [saved]
    if parts.template.tools:
        (run.artifacts / TOOLS).write_text(parts.template.tools_json)
        files.append(run.describe(TOOLS, ArtifactKind.TOOLS))
    if "tensorboard" in job.training.report_to:
        files.append(run.pack(run.path / TENSORBOARD, ArtifactKind.TENSORBOARD))
    run.finish(Manifest(files=tuple(files), result=result))
    ranks.wait_for_all()


def _date(run: RunDirectory, previous: tuple[Path, ...]) -> datetime.date:
    """What the chat template takes for today: one date for a job, however long it waits."""
    for earlier in previous:
        if (earlier / DATE).is_file():
            return datetime.date.fromisoformat((earlier / DATE).read_text())
    today = datetime.datetime.now(datetime.UTC).date()
    (run.path / DATE).write_text(today.isoformat())
    return today


def _looked_before(
    run: RunDirectory,
    job: JobSpec,
    parts: Parts,
    previous: tuple[Path, ...],
) -> PreflightReport | None:
    """The pre-flight report. Only a first attempt looks, and only it is stopped."""
    if not job.preflight.cases:
        return None
    for earlier in reversed(previous):
        if (earlier / PREFLIGHT).is_file():
            return PreflightReport.model_validate_json((earlier / PREFLIGHT).read_bytes())
    if ranks.rank() == 0:
        text = preflight(run, job, parts, parts.training_cases).model_dump_json(indent=1).encode()
        write_whole(run.path / PREFLIGHT, lambda file: file.write(text))
    ranks.wait_for_all()
    report = PreflightReport.model_validate_json((run.path / PREFLIGHT).read_bytes())
    run.emit(EventType.PREFLIGHT, **report.model_dump(mode="json"))
    if report.verdict == "stop" and not job.preflight.only:
        raise refuse(report)
    return report


def _chooser(
    job: JobSpec, parts: Parts, evaluation: HeldOut, cases: list[Case], best: BestWeights
) -> Callable[[int], bool]:
    """Evaluates during training and keeps the best weights. True: stop, it gets no better."""

    def choose(step: int) -> bool:
        result = evaluation.at(f"step-{step}", cases, step=step)
        best.offer(
            parts.trainer.model, step=step, score=(result.pass_rate or 0.0, result.mean_reward)
        )
        patience = job.evaluation.patience
        return patience is not None and best.evaluations_since >= patience

    return choose


def save(run: RunDirectory, job: JobSpec, parts: Parts) -> ProducedFile:
    """The trained adapter (or the whole model), tokenizer, template and tools as one artifact."""
    folder = run.path / "final"
    shutil.rmtree(folder, ignore_errors=True)
    parts.trainer.unwrapped.save_pretrained(folder, max_shard_size="5GB")
    parts.template.tokenizer.save_pretrained(folder)
    (folder / TOOLS).write_text(parts.template.tools_json)
    return run.pack(folder, job.training.result_kind)


def _result(
    job: JobSpec,
    parts: Parts,
    evaluation: HeldOut,
    saved: ProducedFile,
    best: BestWeights,
    today: datetime.date,
    moved: float,
) -> dict[str, Any]:
    trainer = parts.trainer
    gain, reward_gain = gained(evaluation.done.get(BEFORE), evaluation.done.get(AFTER))
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return {
        "final_loss": losses[-1] if losses else None,
        "steps": trainer.state.global_step,
        "best_step": best.step,
        "model": saved.name,
        "template_date": today.isoformat(),
        "moved_weights": moved,
        "parameters": parts.trainer.parameter_counts,
        "cases": {"training": len(parts.training_cases), "held_out": len(parts.held_out)},
        "base_model": job.agent.model,
        "tools": list(job.agent.tools),
        "environment": job.agent.environment,
        "instructions": job.agent.instructions,
        "longest_prompt": _longest_prompt(parts),
        "isolation": str(parts.pool.sandbox.walls),
        "gain": gain and gain.model_dump(),
        "reward_gain": reward_gain and reward_gain.model_dump(),
    }


def _measured(job: JobSpec, parts: Parts) -> dict[str, Any]:
    """The result of a job that has trained nothing."""
    return {
        "base_model": job.agent.model,
        "parameters": parts.trainer.parameter_counts,
        "cases": {"training": 0, "held_out": len(parts.held_out)},
        "longest_prompt": _longest_prompt(parts),
        "isolation": str(parts.pool.sandbox.walls),
    }


def _longest_prompt(parts: Parts) -> int:
    """Tokens of the longest prompt of training and evaluation, earlier attempts included."""
    name = "tokens/longest_prompt"
    logged = [line[name] for line in parts.trainer.state.log_history if name in line]
    played = parts.engine.longest_prompt if isinstance(parts.engine, RolloutEngine) else 0
    return int(max([played, *logged]))


def _warn_of_loss(run: RunDirectory, result: dict[str, Any]) -> None:
    """Say so when the agent has become worse, and not by chance."""
    for name, what in (("gain", "pass rate"), ("reward_gain", "mean reward")):
        gain = result[name]
        if gain and gain["high"] is not None and gain["high"] < 0:
            message = (
                f"the {what} on held-out cases became worse: by {-gain['difference']:.3f} "
                f"(95 % interval {-gain['high']:.3f} to {-gain['low']:.3f}, {gain['count']} cases)"
            )
            run.emit(EventType.WARNING, code="became_worse", message=message)
