"""`dressage generate`: try a trained agent."""

from typing import Annotated, Any

import typer
from rich.markup import escape

from dressage.cli.console import AsJson, Url, console, errors, friendly, print_json
from dressage.client import Client
from dressage.client.client import DEFAULT_URL
from dressage.spec.status import ExportStatus

app = typer.Typer()


@app.command()
def generate(
    job_id: str,
    prompt: Annotated[
        str | None, typer.Argument(help="One message; without it, a conversation.")
    ] = None,
    case: Annotated[str | None, typer.Option(help="A case of the suite instead.")] = None,
    tools: Annotated[bool, typer.Option(help="Run the tools that it calls.")] = True,
    temperature: Annotated[float, typer.Option(min=0, max=5, help="0: greedy.")] = 0.7,
    wait: Annotated[float, typer.Option(min=0, max=300, help="Seconds for an answer.")] = 120,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Ask a trained agent, with the tools and instructions it was trained with."""
    how = {"execute_tools": tools, "temperature": temperature}
    with friendly(), Client(url) as client:
        if prompt is not None or case is not None:
            asked = {"case_id": case} if prompt is None else {"prompt": prompt}
            _ask(client, job_id, {**how, **asked}, wait, as_json=as_json)
            return
        said: list[dict[str, Any]] = []
        while True:
            try:
                said.append({"role": "user", "content": typer.prompt(">", prompt_suffix=" ")})
            except typer.Abort:  # the end of input, or Ctrl-C
                return
            answer = _ask(client, job_id, {**how, "messages": said}, wait, as_json=as_json)
            said.append({"role": "assistant", "content": answer})


def _ask(
    client: Client, job_id: str, request: dict[str, Any], wait: float, *, as_json: bool
) -> str:
    found = client.generate(job_id, request, wait=wait)
    if as_json:
        print_json(found)
    elif found.result:
        for call in found.result.tool_calls:
            shown = ", ".join(f"{k}={v!r}" for k, v in (call.get("arguments") or {}).items())
            result = call.get("error") or call.get("result")
            errors.print(escape(f"{call['name']}({shown}) → {result}"), highlight=False)
        console.print(escape(found.result.answer), highlight=False)
    else:
        errors.print(escape(f"{found.status}: {found.message or 'no answer yet'}"), highlight=False)
    if found.status is not ExportStatus.SUCCEEDED:
        raise typer.Exit(1)
    return found.result.answer if found.result else ""
