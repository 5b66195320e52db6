"""The `dressage` command."""

import typer

from dressage.cli import admin, jobs, queue, service, suites

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Train tool-using agents by reinforcement learning, on your own machines.",
)
for theme in (service, jobs, queue, admin):
    app.add_typer(theme.app)
app.add_typer(suites.app, name="suites")

if __name__ == "__main__":
    app()
