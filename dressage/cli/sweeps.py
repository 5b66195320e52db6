"""Sweeps: matched jobs over a grid, and what they reached."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from dressage.cli.console import AsJson, Url, console, friendly, print_json
from dressage.cli.jobs import plain_value, read_spec, with_own_suite
from dressage.client import Client
from dressage.client.client import DEFAULT_URL
from dressage.spec.sweep import Interval

app = typer.Typer(no_args_is_help=True, help="Matched jobs over a grid of values.")


@app.command()
def submit(
    spec: Annotated[Path, typer.Argument(help="A job specification (JSON).")],
    grid: Annotated[
        list[str],
        typer.Option(help="field=value,value,… as training.seed=0,1,2; may be repeated."),
    ],
    name: Annotated[str | None, typer.Option(help="The job's name unless given.")] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Make a job of every combination of values, all or none."""
    with friendly(), Client(url) as client:
        base = with_own_suite(client, read_spec(spec), spec.parent)
        values = dict(map(_values, grid))
        content = {"name": name or str(base.get("name", "sweep")), "base": base, "grid": values}
        sweep = client.submit_sweep(content)
        if as_json:
            print_json(sweep)
            return
        console.print(sweep.id, highlight=False)


@app.command()
def table(sweep_id: str, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Each arm's mean and 95 % interval over its repetitions."""
    with friendly(), Client(url) as client:
        sweep = client.sweep(sweep_id)
        if as_json:
            print_json(sweep)
            return
        shown = Table("arm", "jobs", "pass rate", "gain", "statuses")
        for arm in sweep.arms:
            values = ", ".join(f"{field}={value}" for field, value in arm.values.items()) or "all"
            statuses = ", ".join(f"{count} {status}" for status, count in arm.statuses.items())
            shown.add_row(
                escape(values),
                str(len(arm.jobs)),
                _interval(arm.pass_rate),
                _interval(arm.gain),
                statuses,
            )
        console.print(shown)


def _values(text: str) -> tuple[str, list[object]]:
    field, equals, values = text.partition("=")
    if not equals or not field or not values:
        raise typer.BadParameter(f"{text!r} is not field=value,value", param_hint="--grid")
    return field, [plain_value(value) for value in values.split(",")]


def _interval(found: Interval | None) -> str:
    if found is None:
        return ""
    if found.low is None or found.high is None:
        return f"{found.mean:.3f}"
    return f"{found.mean:.3f} ({found.low:.3f} to {found.high:.3f})"
