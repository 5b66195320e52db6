"""Runs a job from its directory to its manifest."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dressage.authoring.suite import Suite
from dressage.sandbox.pool import WorkerPool
from dressage.spec.artifact import ArtifactKind
from dressage.spec.event import Evaluation, EventType
from dressage.spec.job import JobSpec
from dressage.spec.preflight import PreflightReport
from dressage.spec.status import JobStatus, Reason
from dressage.spec.suite import Case
from worker.training.evaluate import paired_gain, split
from worker.training.pipeline.build import build
from worker.training.pipeline.held_out import AFTER, BEFORE, HeldOut
from worker.training.pipeline.parts import Parts
from worker.training.pipeline.preflight import preflight, refuse
from worker.training.process.failures import RunFailure
from worker.training.process.user_code import user_code
from worker.training.rollout.engine import RolloutEngine
from worker.training.update import ranks
from worker.training.update.best import BestWeights
from worker.training.update.callbacks import EverySteps
from worker.training.update.config import TENSORBOARD
from worker.training.update.trainer import JobTrainer
from worker.wire.checkpoints import newest_complete
from worker.wire.run_dir import SUITE, Manifest, ProducedFile, RunDirectory, RunSpec, write_whole

log = logging.getLogger(__name__)

FEWEST_CASES = 5  # an interval of fewer says nothing

SANDBOX_WORKERS = 16  # calls that run at the same time; many of them wait for something
PREFLIGHT = "preflight.json"


def run_job(run: RunDirectory) -> None:
    """Run a job from its directory to its manifest.

    Raises:
        RunFailure: For everything that has a reason the user can act on.
    """
    spec = run.spec()
    run.emit(EventType.STATUS, status=JobStatus.PREPARING)
    suite = Suite.from_path(run.path / SUITE)
    with user_code(suite, network=spec.job.resources.network, size=SANDBOX_WORKERS) as pool:
        _run(run, spec, suite, pool)


def _run(run: RunDirectory, spec: RunSpec, suite: Suite, pool: WorkerPool) -> None:
    job, previous = spec.job, tuple(Path(path) for path in spec.previous)
    training_cases, held_out = split(suite.cases, job.evaluation.held_out(len(suite.cases)))
    parts = build(run, job, pool, training_cases)

    report = _looked_before(run, job, parts, training_cases, previous)
    if job.preflight.only:
        run.emit(EventType.STATUS, status=JobStatus.EVALUATING)
        run.finish(Manifest(files=(), result={"preflight": report and report.model_dump()}))
        return
    choosing, proof = _divided(held_out, job)
    evaluation = HeldOut(run, job, parts, previous)
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
    if proof:
        evaluation.at(AFTER, proof, step=step)

    if ranks.rank():
        ranks.wait_for_all()  # an end of one process would end the others
        return
    saved = save(run, job, parts.trainer, parts.tokenizer)
    result = _result(job, parts, evaluation, saved, best)
    _warn_of_loss(run, result)
    if report:
        result["preflight"] = report.model_dump(mode="json")
    files = [saved]
    if "tensorboard" in job.training.report_to:
        files.append(run.pack(run.path / TENSORBOARD, ArtifactKind.TENSORBOARD))
    run.finish(Manifest(files=tuple(files), result=result))
    ranks.wait_for_all()


def _looked_before(
    run: RunDirectory,
    job: JobSpec,
    parts: Parts,
    cases: list[Case],
    previous: tuple[Path, ...],
) -> PreflightReport | None:
    """The pre-flight report. Only a first attempt looks, and only it is stopped."""
    if not job.preflight.cases:
        return None
    for earlier in reversed(previous):
        if (earlier / PREFLIGHT).is_file():
            return PreflightReport.model_validate_json((earlier / PREFLIGHT).read_bytes())
    if ranks.rank() == 0:
        text = preflight(run, job, parts, cases).model_dump_json(indent=1).encode()
        write_whole(run.path / PREFLIGHT, lambda file: file.write(text))
    ranks.wait_for_all()
    report = PreflightReport.model_validate_json((run.path / PREFLIGHT).read_bytes())
    run.emit(EventType.PREFLIGHT, **report.model_dump(mode="json"))
    if report.verdict == "stop" and not job.preflight.only:
        raise refuse(report)
    return report


def _divided(held_out: list[Case], job: JobSpec) -> tuple[list[Case], list[Case]]:
    """Cases to choose weights by, and cases for the proof.

    The best of several evaluations looks better than it is on the cases it was chosen by.
    """
    return (held_out[::2], held_out[1::2]) if job.evaluation.every_steps else ([], held_out)


def _chooser(
    job: JobSpec, parts: Parts, evaluation: HeldOut, cases: list[Case], best: BestWeights
) -> Callable[[int], bool]:
    """Evaluates during training and keeps the best weights. True: stop, it gets no better."""

    def choose(step: int) -> bool:
        result = evaluation.at(f"step-{step}", cases, step=step)
        best.offer(parts.trainer.model, step=step, score=(result.pass_rate, result.mean_reward))
        patience = job.evaluation.patience
        return patience is not None and best.evaluations_since >= patience

    return choose


def save(run: RunDirectory, job: JobSpec, trainer: JobTrainer, tokenizer: Any) -> ProducedFile:
    """The trained adapter (or the whole model), tokenizer and chat template as one artifact."""
    folder = run.path / "final"
    shutil.rmtree(folder, ignore_errors=True)
    trainer.accelerator.unwrap_model(trainer.model).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return run.pack(folder, job.training.result_kind)


def _result(
    job: JobSpec,
    parts: Parts,
    evaluation: HeldOut,
    saved: ProducedFile,
    best: BestWeights,
) -> dict[str, Any]:
    trainer = parts.trainer
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return {
        "final_loss": losses[-1] if losses else None,
        "steps": trainer.state.global_step,
        "best_step": best.step,
        "model": saved.name,
        "base_model": job.agent.model,
        "tools": list(job.agent.tools),
        "environment": job.agent.environment,
        "instructions": job.agent.instructions,
        "longest_prompt": _longest_prompt(parts),
        "isolation": str(parts.pool.sandbox.walls),
        **_gains(evaluation.done),
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
        if gain and gain["count"] >= FEWEST_CASES and gain["high"] < 0:
            message = (
                f"the {what} on held-out cases became worse: by {-gain['difference']:.3f} "
                f"(95 % interval {-gain['high']:.3f} to {-gain['low']:.3f}, {gain['count']} cases)"
            )
            run.emit(EventType.WARNING, code="became_worse", message=message)


def _gains(done: dict[str, Evaluation]) -> dict[str, Any]:
    before, after = done.get(BEFORE), done.get(AFTER)
    if not before or not after:
        return {"gain": None, "reward_gain": None}
    passed = paired_gain(_numbers(before.passed), _numbers(after.passed))
    reward = paired_gain(before.rewards, after.rewards)
    return {
        "gain": passed.model_dump() if passed else None,
        "reward_gain": reward.model_dump() if reward else None,
    }


def _numbers(passed: dict[str, bool]) -> dict[str, float]:
    return {case: float(value) for case, value in passed.items()}
