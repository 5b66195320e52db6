"""Suites: upload, list, delete."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from dressage.cli.console import AsJson, Url, console, friendly, print_json
from dressage.client import Client
from dressage.client.client import DEFAULT_URL

app = typer.Typer(no_args_is_help=True, help="Upload and list suites.")


@app.command("push")
def push_suite(
    path: Annotated[Path, typer.Argument(help="A folder, an archive, or a file of cases.")],
    name: Annotated[str, typer.Option(help="The suite's name.")],
    url: Url = DEFAULT_URL,
) -> None:
    """Upload a suite. The same content is the same version."""
    with friendly(), Client(url) as client:
        info = client.push_suite(path, name)
        console.print(
            f"{info.reference}: {info.case_count} cases, tools: "
            f"{', '.join(tool.name for tool in info.tools) or 'none'}, measures: "
            f"{', '.join(info.measures) or 'none'}",
            highlight=False,
        )


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
