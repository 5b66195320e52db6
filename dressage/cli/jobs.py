"""Jobs: submit, follow, change, export, download."""

import re
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from dressage import strict_json
from dressage.archive import unpack_tar
from dressage.cli.console import WHOLE, AsJson, Url, console, errors, friendly, print_json
from dressage.cli.exporting import export_spec, follow_export, show_parity
from dressage.cli.history import pull_history, require_own_folder
from dressage.cli.watching import watch_job
from dressage.client import Client
from dressage.client.client import DEFAULT_URL
from dressage.spec.job import Job
from dressage.spec.status import TERMINAL, ExportStatus, JobStatus
from dressage.spec.sweep import set_field

app = typer.Typer()


@app.command()
def submit(
    spec: Annotated[Path, typer.Argument(help="A job specification (JSON).")],
    url: Url = DEFAULT_URL,
    watch: Annotated[bool, typer.Option(help="Follow the job to its end.")] = False,
    dry_run: Annotated[bool, typer.Option(help="Check everything, store nothing.")] = False,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="field=value, as training.seed=1; may be repeated."),
    ] = None,
    idempotency_key: Annotated[str | None, typer.Option(help="Submit at most once.")] = None,
    as_json: AsJson = False,
) -> None:
    """Put a job into the queue.

    A model path that starts with a dot is taken relative to the specification's file. So is a
    suite's (`"suite": "./arithmetic"`), which is pushed under its own name before.
    """
    with friendly(), Client(url) as client:
        content = _changed(read_spec(spec), changes or [])
        content = with_own_suite(client, content, spec.parent)
        if dry_run:
            checked = client.check(content)
            console.print_json(checked.model_dump_json())
            return
        job = client.submit(content, idempotency_key=idempotency_key)
        for change in job.adjustments:  # notes: who pipes wants the id alone
            errors.print(f"adjusted {change.field}: {change.requested} → {change.effective}")
            errors.print(f"  [dim]{escape(change.reason)}[/dim]", highlight=False)
        if as_json:
            print_json(job)
        else:
            console.print(job.id, highlight=False)
        if watch:
            _exit_by_status(watch_job(client, job.id, console))


@app.command()
def watch(job_id: str, url: Url = DEFAULT_URL) -> None:
    """Follow a job to its end: progress, reward, loss, pass rate."""
    with friendly(), Client(url) as client:
        _exit_by_status(watch_job(client, job_id, console))


@app.command()
def jobs(
    url: Url = DEFAULT_URL,
    status: JobStatus | None = None,
    name: str | None = None,
    limit: int = 20,
    as_json: AsJson = False,
) -> None:
    """List jobs, newest first."""
    with friendly(), Client(url) as client:
        found = client.jobs(status=status, name=name, limit=limit)
        if as_json:
            print_json(found)
            return
        table = Table(WHOLE("id"), "name", "status", "step", "reward", "created")
        for job in found.items:
            progress = job.progress
            table.add_row(
                job.id,
                escape(job.name),
                job.status,
                f"{progress.step}/{progress.total_steps or '?'}",
                "" if progress.reward is None else f"{progress.reward:.3f}",
                job.created_at.strftime("%Y-%m-%d %H:%M"),
            )
        console.print(table)


@app.command()
def cancel(job_id: str, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """End a job; its files and history stay."""
    with friendly(), Client(url) as client:
        _say(client.cancel(job_id), as_json=as_json)


@app.command()
def pause(job_id: str, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Set a job aside after its current step, with a checkpoint."""
    with friendly(), Client(url) as client:
        _say(client.pause(job_id), as_json=as_json)


@app.command()
def resume(job_id: str, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Continue a paused job from its newest checkpoint."""
    with friendly(), Client(url) as client:
        _say(client.resume(job_id), as_json=as_json)


@app.command()
def retry(job_id: str, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Submit a failed or cancelled job again, as a new one."""
    with friendly(), Client(url) as client:
        job = client.retry(job_id)
        if as_json:
            print_json(job)
            return
        console.print(job.id, highlight=False)


@app.command()
def delete(job_id: str, url: Url = DEFAULT_URL) -> None:
    """Remove an ended job: history, rollouts and files."""
    with friendly(), Client(url) as client:
        client.delete(job_id)


@app.command()
def export(
    job_id: str,
    type: Annotated[str, typer.Argument(help="merged, gguf, gguf_adapter or ollama.")],
    options: Annotated[
        list[str] | None,
        typer.Argument(help="name=value, as quantization=q4_k_m parity_cases=16 checkpoint=40."),
    ] = None,
    wait: Annotated[bool, typer.Option(help="Until it has ended.")] = True,
    url: Url = DEFAULT_URL,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and do not wait.")] = False,
) -> None:
    """Make another file of a trained job, or try one again that failed."""
    with friendly(), Client(url) as client:
        made = client.export(job_id, export_spec(type, options or []))
        if as_json:
            print_json(made)
            return
        if not wait:
            console.print(f"{made.name} {made.status}", highlight=False)
            return
        made = follow_export(client, job_id, made, console)
        if made.result:
            show_parity(made.result.parity, console)
        if made.status is not ExportStatus.SUCCEEDED:
            raise typer.Exit(1)


@app.command()
def preflight(
    spec: Annotated[Path, typer.Argument(help="A job specification (JSON).")],
    url: Url = DEFAULT_URL,
) -> None:
    """Look whether a job can learn, without training it."""
    with friendly(), Client(url) as client:
        job = client.preflight(with_own_suite(client, read_spec(spec), spec.parent))
        console.print(job.id, highlight=False)
        _exit_by_status(watch_job(client, job.id, console))


@app.command()
def evaluate(
    spec: Annotated[Path, typer.Argument(help="A job specification (JSON).")],
    model: Annotated[str | None, typer.Option(help="Instead of the specification's.")] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="field=value, as evaluation.temperature=0; may be repeated."),
    ] = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Measure a model on a suite's held-out cases, without training. Then: dressage compare."""
    with friendly(), Client(url) as client:
        content = {**read_spec(spec), "training": None, "exports": []}
        if model is not None:
            set_field(content, "agent.model", model)
        content = with_own_suite(client, _changed(content, changes or []), spec.parent)
        job = client.submit(content)
        console.print(job.id, highlight=False)
        _exit_by_status(watch_job(client, job.id, console))


@app.command()
def pull(
    job_id: str,
    to: Annotated[Path, typer.Option(help="Folder to download into.")] = Path(),
    unpack: Annotated[bool, typer.Option(help="Unpack adapter and model archives.")] = True,
    history: Annotated[
        bool, typer.Option(help="Also metrics, evaluations, rollouts and the job itself.")
    ] = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Download a job's files and check them. Broken downloads are continued."""
    with friendly(), Client(url) as client:
        files = client.artifacts(job_id)
        if not files and not history:
            errors.print(f"{job_id} has no files ({client.job(job_id).status})", highlight=False)
            raise typer.Exit(1)
        require_own_folder(to, job_id)
        for path in pull_history(client, job_id, to) if history else ():
            console.print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)", highlight=False)
        for file in files:
            path = client.download(job_id, file, to)
            console.print(f"{path} ({file.size / 1e6:.1f} MB)", highlight=False)
            if unpack and path.suffix == ".tar":
                unpack_tar(path, to / path.stem, without_top=True)


def _say(job: Job, *, as_json: bool) -> None:
    if as_json:
        print_json(job)
    else:
        console.print(f"{job.id} is {job.status}", highlight=False)


def plain_value(text: str) -> object:
    """A value of a command line: JSON where it is some, else the text itself."""
    try:
        return strict_json.loads(text)
    except ValueError:
        return text


def _changed(content: dict[str, object], changes: list[str]) -> dict[str, object]:
    for change in changes:
        field, equals, value = change.partition("=")
        if not equals or not field:
            raise typer.BadParameter(f"{change!r} is not field=value", param_hint="--set")
        try:
            set_field(content, field, plain_value(value))
        except ValueError as error:
            raise typer.BadParameter(f"{field}: {error}", param_hint="--set") from None
    return content


def with_own_suite(client: Client, content: dict[str, object], folder: Path) -> dict[str, object]:
    """A specification whose suite, if it is a folder or file beside it, is stored now."""
    named = str(content.get("suite", ""))
    if not named.startswith((".", "/")):
        return content
    path = (folder / named).resolve()
    if not path.exists():
        raise typer.BadParameter(f"suite: there is no file or folder {str(path)!r}")
    info = client.push_suite(path, re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).lstrip("._-"))
    errors.print(f"suite {info.reference}: {info.case_count} cases", highlight=False)
    return {**content, "suite": info.reference}


def read_spec(path: Path) -> dict[str, object]:
    """A job file; paths of models that begin with a dot are taken from where it is."""
    try:
        content = strict_json.loads(path.read_text())
    except OSError as error:
        raise typer.BadParameter(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise typer.BadParameter(f"{path} is not JSON: {error}") from None
    agent = content.get("agent") if isinstance(content, dict) else None
    if isinstance(agent, dict) and str(agent.get("model", "")).startswith("."):
        agent["model"] = str((path.parent / agent["model"]).resolve())
    return dict(content) if isinstance(content, dict) else {"spec": content}


def _exit_by_status(job: Job) -> None:
    report = (job.result or {}).get("preflight") if isinstance(job.result, dict) else None
    if job.spec.preflight.only and report and report["verdict"] == "stop":
        raise typer.Exit(1)
    if job.status is JobStatus.PAUSED or (
        job.status in TERMINAL and job.status is not JobStatus.SUCCEEDED
    ):
        raise typer.Exit(1)
