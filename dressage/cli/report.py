"""One Markdown file of a job: settings, curves, gain, what is served."""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence

from dressage.spec.event import Evaluations, Gain
from dressage.spec.job import Job

CURVES = ("step", "reward", "pass_rate", "loss", "completions/mean_length", "groups/no_spread")
ROWS = 20


def report_of(job: Job, evaluations: Evaluations, metrics_csv: str) -> str:
    """The text of the report."""
    result = job.result or {}
    parts = [
        f"# {job.name}",
        f"`{job.id}` {job.status}{f': {job.message}' if job.message else ''}",
        f"{job.spec.agent.model} on {job.spec.suite}, {job.progress.step} steps"
        f"{f', {_cases(result)}' if result.get('cases') else ''}.",
        "## Gain",
        _gain("pass rate", evaluations.gain),
        _gain("mean reward", evaluations.reward_gain),
        _table(
            ("evaluation", "step", "cases", "pass rate", "mean reward"),
            (
                (e.name, e.step, e.count, _number(e.pass_rate), _number(e.mean_reward))
                for e in evaluations.items
            ),
        ),
        "## Training",
        _curves(metrics_csv),
        "## Served",
        _table(
            ("stage", "cases", "pass rate against trained", "same prompts", "problems", "notes"),
            (
                (
                    report.served,
                    report.cases,
                    _interval(report.pass_rate),
                    _number(report.same_prompt),
                    ", ".join(report.problems) or "none",
                    "; ".join(report.notes),
                )
                for export in job.exports
                for report in (export.result.parity if export.result else ())
            ),
        ),
        "## Settings",
        *(f"- `{a.field}`: {a.requested} → {a.effective} ({a.reason})" for a in job.adjustments),
        f"```json\n{job.spec.model_dump_json(indent=1)}\n```",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _cases(result: dict[str, dict[str, int]]) -> str:
    cases = result["cases"]
    return f"{cases['training']} cases for training and {cases['held_out']} held out"


def _gain(what: str, gain: Gain | None) -> str:
    return f"No {what} before and after." if gain is None else _gain_line(what, gain)


def gain_lines(pass_rate: Gain | None, reward: Gain | None) -> Iterator[str]:
    """The gains that are known, each with its interval, for people."""
    for what, gain in (("pass rate", pass_rate), ("mean reward", reward)):
        if gain:
            yield _gain_line(what, gain)


def _gain_line(what: str, gain: Gain) -> str:
    return (
        f"{what.capitalize()}: {gain.before:.3f} → {gain.after:.3f} on {gain.count} cases, "
        f"{_interval(gain)}"
    )


def _interval(gain: Gain | None) -> str:
    if gain is None:
        return ""
    if gain.low is None or gain.high is None:
        return f"{gain.difference:+.3f} (too few cases for an interval)"
    return f"{gain.difference:+.3f} (95 % {gain.low:+.3f} to {gain.high:+.3f})"


def _curves(metrics_csv: str) -> str:
    rows = list(csv.DictReader(io.StringIO(metrics_csv)))
    every = max(1, -(-len(rows) // ROWS))
    shown = [row for at, row in enumerate(rows) if at % every == 0 or at == len(rows) - 1]
    columns = [name for name in CURVES if rows and name in rows[0]]
    return _table(columns, ([_short(row[name]) for name in columns] for row in shown))


def _short(text: str) -> str:
    try:
        return f"{float(text):.4g}"
    except ValueError:
        return text


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [" | ".join(str(cell).replace("|", "\\|") for cell in row) for row in rows]
    if not lines:
        return "Nothing."
    divider = " | ".join("---" for _ in head)
    return "\n".join(f"| {line} |" for line in (" | ".join(head), divider, *lines))
