"""The queue and the workers that serve it."""

import typer
from rich.markup import escape
from rich.table import Table

from dressage.cli.console import WHOLE, AsJson, Url, console, friendly, print_json
from dressage.client import Client
from dressage.client.client import DEFAULT_URL
from dressage.spec.queue import QueueEntry, Worker

app = typer.Typer()


@app.command()
def queue(url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show what waits: place, reason, estimated start."""
    with friendly(), Client(url) as client:
        state = client.queue()
        if as_json:
            print_json(state)
            return
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
def workers(url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show what there is to run jobs."""
    with friendly(), Client(url) as client:
        found = client.workers()
        if as_json:
            print_json(found)
            return
        table = Table(WHOLE("worker"), "queue", "state", "GPUs", "type", "labels", "runs")
        for worker in found:
            reason = f" ({worker.state_reason})" if worker.state_reason else ""
            table.add_row(
                worker.id,
                worker.queue,
                escape(worker.state + reason),
                str(worker.gpus),
                worker.gpu_type or "",
                ", ".join(worker.labels),
                ", ".join((*worker.jobs, *worker.exports)),
            )
        console.print(table)


@app.command()
def drain(worker_id: str, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Let a worker finish what it runs, and take nothing new."""
    with friendly(), Client(url) as client:
        _say(client.drain(worker_id), as_json=as_json)


@app.command()
def activate(worker_id: str, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Let a drained or sick worker take jobs again."""
    with friendly(), Client(url) as client:
        _say(client.activate(worker_id), as_json=as_json)


def _say(worker: Worker, *, as_json: bool) -> None:
    if as_json:
        print_json(worker)
    else:
        console.print(f"{worker.id} is {worker.state}", highlight=False)


def _starts_in(entry: QueueEntry) -> str:
    start = entry.estimated_start
    if start is None:
        return "unknown"
    first, last = (
        max(0, round((moment - entry.looked_at).total_seconds() / 60))
        for moment in (start.earliest, start.latest)
    )
    return f"{first} to {last} min" if last else "less than a minute"
