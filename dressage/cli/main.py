"""The `dressage` command."""

from importlib.metadata import version
from typing import Annotated

import typer

from dressage.cli import admin, jobs, queue, results, service, suites

app = typer.Typer(
    no_args_is_help=True,
)
for theme in (service, jobs, results, queue, admin):
    app.add_typer(theme.app)
app.add_typer(suites.app, name="suites")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dressage {version('dressage')}")
        raise typer.Exit


@app.callback()
def dressage(
    _version_wanted: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print it and end."),
    ] = False,
) -> None:
    """Train tool-using agents by reinforcement learning, on your own machines."""


if __name__ == "__main__":
    app()
