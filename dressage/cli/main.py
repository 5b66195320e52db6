"""The `dressage` command."""

from importlib.metadata import version
from typing import Annotated

import typer

from dressage.cli import (
    admin,
    asking,
    doctor,
    jobs,
    queue,
    results,
    service,
    starting,
    suites,
    sweeps,
)

app = typer.Typer(
    no_args_is_help=True,
)
for theme in (service, doctor, starting, jobs, results, asking, queue, admin):
    app.add_typer(theme.app)
app.add_typer(suites.app, name="suites")
app.add_typer(sweeps.app, name="sweep")


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
