"""A job's live view in the terminal."""

from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dressage.cli.report import gain_lines
from dressage.client import Client
from dressage.spec.event import Evaluations, Event, EventType
from dressage.spec.job import Job
from dressage.spec.status import JobStatus

QUIET = (EventType.ROLLOUT, EventType.ADJUSTMENT)


INTERRUPTED = 130  # as shells have it


def watch_job(client: Client, job_id: str, console: Console) -> Job:
    """Show a job from its first event to its last, and return it as it ended."""
    try:
        return _watch(client, job_id, console)
    except KeyboardInterrupt:
        told = f"no longer watched; {job_id} goes on (dressage watch {job_id}, dressage cancel …)"
        Console(stderr=True).print(told, highlight=False)
        raise typer.Exit(INTERRUPTED) from None


def _watch(client: Client, job_id: str, console: Console) -> Job:
    waiting = client.job(job_id).waiting
    if waiting:
        console.print(f"queued: {escape(waiting.reason)}", highlight=False)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[metrics]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=False) as progress:
        bar = progress.add_task("training", total=None, metrics="", visible=False)
        for event in client.follow(job_id):
            if event.type is EventType.PROGRESS:
                data = event.data
                progress.update(
                    bar, completed=data["step"], total=data["total_steps"], visible=True
                )
            elif event.type is EventType.METRICS:
                progress.update(bar, metrics=_metrics(event))
                if not console.is_terminal:
                    line = f"step {event.data['step']}: {_metrics(event)}"
                    console.print(line, highlight=False)
            elif event.type not in QUIET:
                console.print(escape(_line(event)), highlight=False)
            paused = event.type is EventType.STATUS and event.data["status"] == JobStatus.PAUSED
            if paused and client.job(job_id).status is JobStatus.PAUSED:
                break  # it still is: until somebody resumes it, nothing will come
    job = client.job(job_id)
    measured = job.spec.preflight.only or job.spec.evaluation.only
    if job.status is JobStatus.SUCCEEDED and not measured:
        _show_gain(client.evaluations(job_id), console)
    return job


def _show_gain(evaluations: Evaluations, console: Console) -> None:
    """Did it help? The end of what somebody has watched."""
    for line in gain_lines(evaluations.gain, evaluations.reward_gain):
        console.print(line, highlight=False)


def _metrics(event: Event) -> str:
    shown = {"reward": "reward", "loss": "loss", "pass_rate": "pass rate"}
    values = event.data["values"]
    return "  ".join(
        f"{label} {values[name]:.3f}"
        for name, label in shown.items()
        if values.get(name) is not None
    )


def _line(event: Event) -> str:
    data = event.data
    if event.type is EventType.STATUS:
        return " ".join(filter(None, [data["status"], data.get("message")]))
    if event.type is EventType.EVALUATION:
        rate = data["pass_rate"]
        passed = "" if rate is None else f"pass rate {rate:.3f} of "
        return (
            f"evaluation {data['name']}: {passed}{data['count']} held-out cases, mean reward "
            f"{data['mean_reward']:.3f}"
        )
    if event.type is EventType.EXPORT:
        return " ".join(filter(None, [data["export"], data["status"], data.get("message")]))
    if event.type is EventType.ARTIFACT:
        return f"{data['name']}: {data['size'] / 1e6:.1f} MB"
    if event.type is EventType.CHECKPOINT:
        return f"checkpoint at step {data['step']}"
    if event.type is EventType.PREFLIGHT:
        return "\n".join([_preflight(data), *(f"  {reason}" for reason in data["reasons"])])
    return str(data.get("message", data))


def _preflight(report: dict[str, Any]) -> str:
    hours = report["time"]["hours"]
    return (
        f"pre-flight: {report['verdict']}; {report['cases']} cases, pass@1 "
        f"{report['pass_at_1']:.2f}, pass@{report['group_size']} {report['pass_at_k']:.2f}, "
        f"{report['mixed_groups']:.0%} of groups mixed, {report['truncated']:.0%} cut; "
        + (f"{hours:.1f} hours" if hours >= 1 else f"{hours * 60:.1f} minutes")
        + f" for {report['time']['steps']} steps"
    )
