"""The `dressage` command. Everything but `up` goes through the client."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from dressage.archive import unpack_tar
from dressage.authoring.errors import AuthoringError
from dressage.cli.exporting import export_spec, follow_export, show_parity
from dressage.cli.history import pull_history
from dressage.cli.watching import watch_job
from dressage.client import ApiError, Client, DownloadCorrupt, ServiceUnreachable
from dressage.client.client import DEFAULT_URL
from dressage.client.config import store_key, stored_key
from dressage.spec.job import Job
from dressage.spec.queue import QueueEntry
from dressage.spec.status import TERMINAL, ExportStatus, JobStatus
from dressage.spec.team import KeySpec, Role, UsageBy
from dressage.stack.errors import StackError
from dressage.stack.up import Stack, StackOptions, default_data_dir

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
suites = typer.Typer(no_args_is_help=True, help="Upload and list suites.")
app.add_typer(suites, name="suites")
keys = typer.Typer(no_args_is_help=True, help="Make, list and revoke API keys.")
app.add_typer(keys, name="keys")
teams = typer.Typer(no_args_is_help=True, help="Teams that share the GPUs, and their limits.")
app.add_typer(teams, name="teams")

WHOLE = partial(Column, no_wrap=True)  # of what is copied into the next command

console = Console()
errors = Console(stderr=True)

Url = Annotated[
    str, typer.Option(envvar="DRESSAGE_URL", help="Address of the service.", show_default=True)
]


@app.command()
def up(
    data_dir: Annotated[
        Path | None, typer.Option(help="Where everything is kept.", envvar="DRESSAGE_DATA_DIR")
    ] = None,
    host: str = "127.0.0.1",
    port: int = 8400,
    database_url: Annotated[str | None, typer.Option(envvar="DRESSAGE_DATABASE_URL")] = None,
    redis_url: Annotated[str | None, typer.Option(envvar="DRESSAGE_REDIS_URL")] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            envvar="DRESSAGE_STORAGE",
            help="A directory, or s3://bucket/prefix; in the data directory unless given.",
        ),
    ] = None,
) -> None:
    """Start the whole service on this machine, until Ctrl-C."""
    options = StackOptions(
        data_dir=data_dir or default_data_dir(),
        host=host,
        port=port,
        database_url=database_url,
        redis_url=redis_url,
        storage=storage,
    )
    stack = Stack(options, say=lambda line: console.print(escape(line), highlight=False))
    try:
        stack.start()
    except StackError as error:
        errors.print(f"[red]dressage up:[/red] {escape(str(error))}", highlight=False)
        raise typer.Exit(1) from None
    key = stack.missing_key(stored_key(options.url))
    if key:
        file = store_key(options.url, key)
        console.print(
            f"an operator key, shown once and kept in {file}: {key}",
            highlight=False,
            soft_wrap=True,
        )
    console.print(f"ready: {options.url} (API documentation: {options.url}/docs)", highlight=False)
    stack.run_until_stopped()


@app.command()
def submit(
    spec: Annotated[Path, typer.Argument(help="A job specification (JSON).")],
    url: Url = DEFAULT_URL,
    watch: Annotated[bool, typer.Option(help="Follow the job to its end.")] = False,
    dry_run: Annotated[bool, typer.Option(help="Check everything, store nothing.")] = False,
    idempotency_key: Annotated[str | None, typer.Option(help="Submit at most once.")] = None,
) -> None:
    """Put a job into the queue.

    A model path that starts with a dot is taken relative to the specification's file.
    """
    with _friendly(), Client(url) as client:
        content = _read_spec(spec)
        if dry_run:
            checked = client.check(content)
            console.print_json(checked.model_dump_json())
            return
        job = client.submit(content, idempotency_key=idempotency_key)
        for change in job.adjustments:
            console.print(f"adjusted {change.field}: {change.requested} → {change.effective}")
            console.print(f"  [dim]{escape(change.reason)}[/dim]", highlight=False)
        console.print(job.id, highlight=False)
        if watch:
            _exit_by_status(watch_job(client, job.id, console))


@app.command()
def watch(job_id: str, url: Url = DEFAULT_URL) -> None:
    """Follow a job to its end: progress, reward, loss, pass rate."""
    with _friendly(), Client(url) as client:
        _exit_by_status(watch_job(client, job_id, console))


@app.command()
def jobs(
    url: Url = DEFAULT_URL,
    status: JobStatus | None = None,
    name: str | None = None,
    limit: int = 20,
) -> None:
    """List jobs, newest first."""
    with _friendly(), Client(url) as client:
        table = Table(WHOLE("id"), "name", "status", "step", "reward", "created")
        for job in client.jobs(status=status, name=name, limit=limit).items:
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
def cancel(job_id: str, url: Url = DEFAULT_URL) -> None:
    """End a job; its files and history stay."""
    with _friendly(), Client(url) as client:
        console.print(f"{job_id} is {client.cancel(job_id).status}", highlight=False)


@app.command()
def pause(job_id: str, url: Url = DEFAULT_URL) -> None:
    """Set a job aside after its current step, with a checkpoint."""
    with _friendly(), Client(url) as client:
        console.print(f"{job_id} is {client.pause(job_id).status}", highlight=False)


@app.command()
def retry(job_id: str, url: Url = DEFAULT_URL) -> None:
    """Submit a failed or cancelled job again, as a new one."""
    with _friendly(), Client(url) as client:
        console.print(client.retry(job_id).id, highlight=False)


@app.command()
def delete(job_id: str, url: Url = DEFAULT_URL) -> None:
    """Remove an ended job: history, rollouts and files."""
    with _friendly(), Client(url) as client:
        client.delete(job_id)


@app.command()
def resume(job_id: str, url: Url = DEFAULT_URL) -> None:
    """Let a paused job go on from its newest checkpoint."""
    with _friendly(), Client(url) as client:
        console.print(f"{job_id} is {client.resume(job_id).status}", highlight=False)


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
) -> None:
    """Make another file of a trained job, or try one again that failed."""
    with _friendly(), Client(url) as client:
        made = client.export(job_id, export_spec(type, options or []))
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
    with _friendly(), Client(url) as client:
        job = client.preflight(_read_spec(spec))
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
    with _friendly(), Client(url) as client:
        for path in pull_history(client, job_id, to) if history else ():
            console.print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)", highlight=False)
        files = client.artifacts(job_id)
        if not files and not history:
            errors.print(f"{job_id} has no files ({client.job(job_id).status})", highlight=False)
            raise typer.Exit(1)
        for file in files:
            path = client.download(job_id, file, to)
            console.print(f"{path} ({file.size / 1e6:.1f} MB)", highlight=False)
            if unpack and path.suffix == ".tar":
                unpack_tar(path, to)


@suites.command("push")
def push_suite(
    path: Annotated[Path, typer.Argument(help="A folder, an archive, or a file of cases.")],
    name: Annotated[str, typer.Option(help="The suite's name.")],
    url: Url = DEFAULT_URL,
) -> None:
    """Upload a suite. The same content is the same version."""
    with _friendly(), Client(url) as client:
        info = client.push_suite(path, name)
        console.print(
            f"{info.reference}: {info.case_count} cases, tools: "
            f"{', '.join(tool.name for tool in info.tools) or 'none'}, measures: "
            f"{', '.join(info.measures) or 'none'}",
            highlight=False,
        )


@suites.command("delete")
def delete_suite(
    reference: Annotated[str, typer.Argument(help="name@version, or an id.")],
    url: Url = DEFAULT_URL,
) -> None:
    """Remove a version that no job uses."""
    with _friendly(), Client(url) as client:
        client.delete_suite(reference)


@suites.command("list")
def list_suites(url: Url = DEFAULT_URL, name: str | None = None) -> None:
    """List suites, newest first."""
    with _friendly(), Client(url) as client:
        table = Table("suite", "cases", "tools", "measures", "created")
        for info in client.suites(name=name).items:
            table.add_row(
                info.reference,
                str(info.case_count),
                ", ".join(tool.name for tool in info.tools),
                ", ".join(info.measures),
                info.created_at.strftime("%Y-%m-%d %H:%M"),
            )
        console.print(table)


@app.command()
def queue(url: Url = DEFAULT_URL) -> None:
    """Show what waits: place, reason, estimated start."""
    with _friendly(), Client(url) as client:
        state = client.queue()
        table = Table("#", WHOLE("job"), "team", "class", "GPUs", "starts in", "why it waits")
        for entry in state.items:
            table.add_row(
                str(entry.position),
                entry.job_id or "(not yours)",
                entry.team,
                entry.priority,
                str(entry.gpus),
                _starts_in(entry),
                escape(entry.reason),
            )
        console.print(table)
        console.print(
            f"{state.running} jobs run; {state.gpus_free} of {state.gpus} GPUs are free",
            highlight=False,
        )


@app.command()
def workers(url: Url = DEFAULT_URL) -> None:
    """Show what there is to run jobs."""
    with _friendly(), Client(url) as client:
        table = Table(WHOLE("worker"), "queue", "state", "GPUs", "type", "labels", "runs")
        for worker in client.workers():
            reason = f" ({worker.state_reason})" if worker.state_reason else ""
            table.add_row(
                worker.id,
                worker.queue,
                escape(worker.state + reason),
                str(worker.gpus),
                worker.gpu_type or "",
                ", ".join(worker.labels),
                ", ".join(worker.jobs),
            )
        console.print(table)


@app.command()
def drain(worker_id: str, url: Url = DEFAULT_URL) -> None:
    """Let a worker finish what it runs, and take nothing new."""
    with _friendly(), Client(url) as client:
        console.print(f"{worker_id} is {client.drain(worker_id).state}", highlight=False)


@app.command()
def activate(worker_id: str, url: Url = DEFAULT_URL) -> None:
    """Let a drained or sick worker take jobs again."""
    with _friendly(), Client(url) as client:
        console.print(f"{worker_id} is {client.activate(worker_id).state}", highlight=False)


@app.command()
def usage(
    url: Url = DEFAULT_URL,
    by: UsageBy = UsageBy.TEAM,
    since: Annotated[datetime | None, typer.Option(help="30 days ago unless given.")] = None,
    csv: Annotated[bool, typer.Option(help="Print CSV.")] = False,
) -> None:
    """Show GPU time by team, job or attempt."""
    with _friendly(), Client(url) as client:
        start = since.astimezone().isoformat() if since else None
        if csv:
            print(client.usage_csv(by=by, since=start), end="")  # noqa: T201  for other programs
            return
        table = Table("team", WHOLE("job"), "attempts", "GPU hours", "hours")
        for row in client.usage(by=by, since=start).items:
            table.add_row(
                row.team,
                f"{row.job_id or ''}{f' #{row.attempt}' if row.attempt else ''}",
                str(row.attempts),
                f"{row.gpu_seconds / 3600:.2f}",
                f"{row.seconds / 3600:.2f}",
            )
        console.print(table)


@app.command()
def audit(url: Url = DEFAULT_URL) -> None:
    """Show who changed what, newest first."""
    with _friendly(), Client(url) as client:
        table = Table("time", "team", WHOLE("key"), "action", "on")
        for entry in client.audit().items:
            time = entry.time.strftime("%Y-%m-%d %H:%M:%S")
            table.add_row(time, entry.team, entry.key_id, entry.action, escape(entry.target))
        console.print(table)


@keys.command("create")
def create_key(
    team: Annotated[str, typer.Option(help="Whose key it is.")],
    role: Role = Role.SUBMITTER,
    name: Annotated[str, typer.Option(help="Who or what uses it.")] = "",
    expires: Annotated[datetime | None, typer.Option(help="When it ends.")] = None,
    requests_per_minute: int | None = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Make a key. It is shown once."""
    with _friendly(), Client(url) as client:
        made = client.create_key(
            KeySpec(
                team=team,
                role=role,
                name=name,
                expires_at=expires.astimezone() if expires else None,
                requests_per_minute=requests_per_minute,
            )
        )
        errors.print(f"{made.id}: shown once, keep it", highlight=False)
        print(made.secret)  # noqa: T201  alone on its line, for other programs


@keys.command("list")
def list_keys(url: Url = DEFAULT_URL) -> None:
    """List keys, newest first."""
    with _friendly(), Client(url) as client:
        table = Table(WHOLE("id"), "team", "role", "name", "begins with", "state")
        for key in client.keys().items:
            state = "revoked" if key.revoked_at else "valid"
            if key.expires_at and not key.revoked_at:
                state = f"until {key.expires_at:%Y-%m-%d %H:%M}"
            table.add_row(key.id, key.team, key.role, escape(key.name), key.prefix, state)
        console.print(table)


@keys.command("revoke")
def revoke_key(key_id: str, url: Url = DEFAULT_URL) -> None:
    """End a key, for good."""
    with _friendly(), Client(url) as client:
        client.revoke_key(key_id)
        console.print(f"{key_id} is revoked", highlight=False)


@keys.command("use")
def use_key(
    key: Annotated[str, typer.Argument(help="The secret, `drs_…`.")], url: Url = DEFAULT_URL
) -> None:
    """Keep a key in the config file, for this service."""
    console.print(f"kept in {store_key(url, key)}", highlight=False, soft_wrap=True)


@keys.command("show")
def show_key(url: Url = DEFAULT_URL) -> None:
    """Print the key that commands use for this service."""
    key = stored_key(url)
    if key is None:
        errors.print(f"no key for {url}; keep one with `dressage keys use`", highlight=False)
        raise typer.Exit(1)
    print(key)  # noqa: T201  for other programs


@teams.command("set")
def set_team(
    name: str,
    weight: float = 1.0,
    max_running_gpus: int | None = None,
    max_queued_jobs: int | None = None,
    gpu_hours_per_day: float | None = None,
    gpu_hours_per_month: float | None = None,
    max_storage_gb: float | None = None,
    keep_files_days: float | None = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Make a team, or give it other limits; what is left out has no limit."""
    limits = {
        "weight": weight,
        "max_running_gpus": max_running_gpus,
        "max_queued_jobs": max_queued_jobs,
        "gpu_seconds_per_day": None if gpu_hours_per_day is None else gpu_hours_per_day * 3600,
        "gpu_seconds_per_month": (
            None if gpu_hours_per_month is None else gpu_hours_per_month * 3600
        ),
        "max_storage_bytes": None if max_storage_gb is None else int(max_storage_gb * 1e9),
        "keep_files_days": keep_files_days,
    }
    with _friendly(), Client(url) as client:
        console.print(f"team {client.put_team(name, limits).name} is set", highlight=False)


@teams.command("list")
def list_teams(url: Url = DEFAULT_URL) -> None:
    """List teams with their limits and what they use now."""
    with _friendly(), Client(url) as client:
        table = Table("team", "weight", "running GPUs", "queued jobs", "storage")
        for team in client.teams():
            table.add_row(
                team.name,
                f"{team.weight:g}",
                _of(team.running_gpus, team.max_running_gpus),
                _of(team.queued_jobs, team.max_queued_jobs),
                f"{team.storage_bytes / 1e9:.2f} GB",
            )
        console.print(table)


def _of(used: int, limit: int | None) -> str:
    return str(used) if limit is None else f"{used} of {limit}"


def _starts_in(entry: QueueEntry) -> str:
    start = entry.estimated_start
    if start is None:
        return "unknown"
    first, last = (
        max(0, round((moment - entry.looked_at).total_seconds() / 60))
        for moment in (start.earliest, start.latest)
    )
    return f"{first} to {last} min" if last else "now"


def _read_spec(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise typer.BadParameter(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise typer.BadParameter(f"{path} is not JSON: {error}") from None
    agent = content.get("agent") if isinstance(content, dict) else None
    if isinstance(agent, dict) and str(agent.get("model", "")).startswith("."):
        agent["model"] = str((path.parent / agent["model"]).resolve())
    return dict(content) if isinstance(content, dict) else {"spec": content}


@contextmanager
def _friendly() -> Iterator[None]:
    """Errors as sentences, never as a stack trace."""
    try:
        yield
    except ApiError as error:
        errors.print(f"[red]refused ({error.code}):[/red] {escape(error.detail)}", highlight=False)
        for problem in error.errors[1:]:
            line = f" line {problem['line']}" if problem.get("line") else ""
            place = f"{problem.get('field') or ''}{line}"
            errors.print(f"  {escape(place)}: {escape(problem['message'])}", highlight=False)
        raise typer.Exit(1) from None
    except (ServiceUnreachable, DownloadCorrupt, AuthoringError) as error:
        errors.print(f"[red]error:[/red] {escape(str(error))}", highlight=False)
        raise typer.Exit(1) from None


def _exit_by_status(job: Job) -> None:
    if job.status is JobStatus.PAUSED or (
        job.status in TERMINAL and job.status is not JobStatus.SUCCEEDED
    ):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
