"""`dressage export`: ask for a file of a trained job, and show what came of it."""

import time
from collections.abc import Iterable, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dressage import strict_json
from dressage.client import Client
from dressage.spec.job import ExportView
from dressage.spec.parity import ParityReport
from dressage.spec.status import EXPORT_TERMINAL

POLL_SECONDS = 1.0


def export_spec(kind: str, options: Iterable[str]) -> dict[str, Any]:
    """The specification of `TYPE` and `name=value` words; values are JSON, or else text.

    Raises:
        BadParameter: A word is no `name=value`.
    """
    spec: dict[str, Any] = {"type": kind}
    for option in options:
        name, equals, text = option.partition("=")
        if not equals:
            raise typer.BadParameter(f"{option!r} is no name=value")
        try:
            spec[name] = strict_json.loads(text)
        except ValueError:
            spec[name] = text
    return spec


def follow_export(client: Client, job_id: str, export: ExportView, console: Console) -> ExportView:
    """Wait for an export's end, saying each change of it."""
    said = None
    while True:
        if (export.status, export.message) != said:
            said = (export.status, export.message)
            text = " ".join(filter(None, [export.name, export.status, export.message]))
            console.print(escape(text), highlight=False)
        if export.status in EXPORT_TERMINAL:
            return export
        time.sleep(POLL_SECONDS)
        export = next(one for one in client.exports(job_id) if one.id == export.id)


def show_parity(reports: Sequence[ParityReport], console: Console) -> None:
    """A table of what is served against what was trained."""
    if not reports:
        return
    table = Table(
        "served", "pass rate", "same prompt", "same answer", "KL", "KL of base", "problems"
    )
    for report in reports:
        gain = report.pass_rate
        table.add_row(
            report.served,
            f"{gain.before:.2f} → {gain.after:.2f}" if gain else "",
            _share(report.same_prompt),
            _share(report.same_answer),
            _nats(report.kl),
            _nats(report.kl_base),
            ", ".join(report.problems) or "none",
        )
    console.print(table)


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _nats(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
