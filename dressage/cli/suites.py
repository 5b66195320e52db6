"""Suites: upload, list, delete."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from dressage.cli.console import WHOLE, AsJson, Url, console, errors, friendly, print_json
from dressage.client import Client
from dressage.client.client import DEFAULT_URL
from dressage.measuring.check import ANSWERS, check_suite
from dressage.sandbox.process import SandboxStartError

app = typer.Typer(no_args_is_help=True, help="Upload and list suites.")


@app.command("push")
def push_suite(
    path: Annotated[Path, typer.Argument(help="A folder, an archive, or a file of cases.")],
    name: Annotated[str, typer.Option(help="The suite's name.")],
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Upload a suite. The same content is the same version."""
    with friendly(), Client(url) as client:
        info = client.push_suite(path, name)
        if as_json:
            print_json(info)
            return
        console.print(
            f"{info.reference}: {info.case_count} cases, tools: "
            f"{', '.join(tool.name for tool in info.tools) or 'none'}, measures: "
            f"{', '.join(info.measures) or 'none'}",
            highlight=False,
        )


@app.command("check")
def check(
    path: Annotated[Path, typer.Argument(help="A folder, an archive, or a file of cases.")],
    cases: Annotated[int, typer.Option(min=1, help="The first so many are tried.")] = 20,
) -> None:
    """Look at a suite before it is uploaded, without a service: cases, code, measures.

    Fails when something is wrong, or a measure fails.
    """
    with friendly():
        try:
            found = check_suite(path, cases=cases)
        except SandboxStartError as error:
            errors.print(f"[red]error:[/red] {escape(str(error))}", highlight=False)
            raise typer.Exit(1) from None
    names = {
        "tools": [tool["name"] for tool in found.contents["tools"]],
        "environments": [world["name"] for world in found.contents["environments"]],
        "measures": found.contents["measures"],
    }
    told = [f"{what}: {', '.join(known)}" for what, known in names.items() if known]
    console.print("; ".join([f"{len(found.suite.cases)} cases", *told]), highlight=False)
    if found.values:
        table = Table(WHOLE("measure"), *(f"said: {answer}" for answer in ANSWERS))
        for measure, values in found.values.items():
            row = ("failed" if value is None else f"{value:.2f}" for value in values.values())
            table.add_row(measure, *row)
        console.print(table)
    for measure, answer, value in found.given_for_nothing:
        errors.print(
            f"note: {measure} gives {value:.2f} to an agent that says: {answer}", highlight=False
        )
    for measure, message in found.failures.items():
        errors.print(f"[red]{measure} fails:[/red] {escape(message)}", highlight=False)
    if found.failures:
        raise typer.Exit(1)


@app.command("list")
def list_suites(url: Url = DEFAULT_URL, name: str | None = None, as_json: AsJson = False) -> None:
    """List suites, newest first."""
    with friendly(), Client(url) as client:
        found = client.suites(name=name)
        if as_json:
            print_json(found)
            return
        table = Table("suite", "cases", "tools", "measures", "created")
        for info in found.items:
            table.add_row(
                info.reference,
                str(info.case_count),
                ", ".join(tool.name for tool in info.tools),
                ", ".join(info.measures),
                info.created_at.strftime("%Y-%m-%d %H:%M"),
            )
        console.print(table)


@app.command("delete")
def delete_suite(
    reference: Annotated[str, typer.Argument(help="name@version, or an id.")],
    url: Url = DEFAULT_URL,
) -> None:
    """Remove a version that no job uses."""
    with friendly(), Client(url) as client:
        client.delete_suite(reference)
