"""`dressage up`: the whole service on this machine."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from dressage.cli.console import console, errors
from dressage.client.config import store_key, stored_key
from dressage.local.errors import LaunchError
from dressage.local.service import LocalOptions, LocalService, default_data_dir

app = typer.Typer()


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
    options = LocalOptions(
        data_dir=data_dir or default_data_dir(),
        host=host,
        port=port,
        database_url=database_url,
        redis_url=redis_url,
        storage=storage,
    )
    service = LocalService(options, say=lambda line: console.print(escape(line), highlight=False))
    try:
        service.start()
    except LaunchError as error:
        errors.print(f"[red]dressage up:[/red] {escape(str(error))}", highlight=False)
        raise typer.Exit(1) from None
    key = service.missing_key(stored_key(options.url))
    if key:
        file = store_key(options.url, key)
        console.print(
            f"an operator key, shown once and kept in {file}: {key}",
            highlight=False,
            soft_wrap=True,
        )
    console.print(f"ready: {options.url} (API documentation: {options.url}/docs)", highlight=False)
    service.run_until_stopped()
