"""What all commands share: the terminal, the service's address, and errors as sentences."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.markup import escape
from rich.table import Column

from dressage.authoring.errors import AuthoringError
from dressage.client import ApiError
from dressage.client.errors import DressageError

WHOLE = partial(Column, no_wrap=True)  # of what is copied into the next command

PIPED = 10_000  # columns: what is piped is read by a program, and not cut

console = Console(width=None if sys.stdout.isatty() else PIPED)
errors = Console(stderr=True)

Url = Annotated[
    str, typer.Option(envvar="DRESSAGE_URL", help="Address of the service.", show_default=True)
]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def print_json(content: Any) -> None:
    """What the API answers, as JSON."""
    if isinstance(content, BaseModel):
        content = content.model_dump(mode="json")
    elif isinstance(content, list | tuple):
        content = [
            one.model_dump(mode="json") if isinstance(one, BaseModel) else one for one in content
        ]
    console.file.write(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


@contextmanager
def friendly() -> Iterator[None]:
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
    except (DressageError, AuthoringError, OSError) as error:
        errors.print(f"[red]error:[/red] {escape(str(error))}", highlight=False)
        raise typer.Exit(1) from None
