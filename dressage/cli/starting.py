"""`dressage init`: a suite of one's own that works, to be changed."""

import json
from enum import StrEnum
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated

import typer

from dressage.cli.console import console, errors, friendly

app = typer.Typer()
STARTERS, SUFFIX = "starters", ".txt"  # files of Python that are no modules of ours
MODEL = "Qwen/Qwen3-0.6B"


class Template(StrEnum):
    """What to begin with."""

    TOOLS = "tools"
    WORLD = "world"
    JUDGE = "judge"


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Where; it must be empty, or not be there.")],
    template: Annotated[
        Template,
        typer.Option(help="Functions as tools, a world with a state, or a model as a judge."),
    ] = Template.TOOLS,
    model: Annotated[
        str, typer.Option(help="A name on the hub, or the folder of a model on the workers.")
    ] = MODEL,
    gpus: Annotated[int, typer.Option(min=0, help="Of the job; 0: on a CPU.")] = 1,
) -> None:
    """Begin a suite of your own: cases, tools, measures with a test, and a job."""
    with friendly():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise typer.BadParameter(f"{folder} is there already, and not an empty folder")
        words = {"NAME": folder.resolve().name, "MODEL": model, "GPUS": str(gpus)}
        source = files("dressage") / STARTERS / template
        written = sorted(_copied(source, folder, words))
        suite = next(path.parent for path in written if path.name == "cases.jsonl")
    for path in written:
        console.print(str(path), highlight=False)
    errors.print(
        f"\ntry it:  dressage suites check {suite}\n"
        f"         python -m pytest {folder}\n"
        f"train:   dressage submit {folder / 'job.json'} --watch",
        highlight=False,
    )


def _copied(source: Traversable, target: Path, words: dict[str, str]) -> list[Path]:
    found = []
    for entry in source.iterdir():
        if entry.is_dir():
            found += _copied(entry, target / entry.name, words)
            continue
        target.mkdir(parents=True, exist_ok=True)
        text = entry.read_text()
        path = target / entry.name.removesuffix(SUFFIX)
        if path.suffix == ".json":
            for word, value in words.items():
                text = text.replace(word, json.dumps(value)[1:-1])
        path.write_text(text)
        found.append(path)
    return found
