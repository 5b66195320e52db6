"""What came of jobs: gain, flips, rollouts, metrics; and whether one did better than another."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from dressage import strict_json
from dressage.cli.console import WHOLE, AsJson, Url, console, friendly, print_json
from dressage.cli.report import gain_lines
from dressage.client import Client
from dressage.client.client import DEFAULT_URL
from dressage.spec.event import Evaluation, Evaluations, EventType, Rollout
from dressage.spec.job import Job

app = typer.Typer()
SHOWN_CASES = 20
PAGE = 100


@app.command()
def show(job_id: str, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """What came of a job: gain, cases that flipped, why it ended, files, exports."""
    with friendly(), Client(url) as client:
        job = client.job(job_id)
        if as_json:
            print_json(job)
            return
        evaluations = client.evaluations(job_id)
        for line in _story(job, evaluations):
            console.print(escape(line), highlight=False)
        if job.artifacts:
            table = Table(WHOLE("file"), "MB", "kind")
            for file in job.artifacts:
                table.add_row(file.name, f"{file.size / 1e6:.1f}", file.kind)
            console.print(table)


@app.command()
def compare(
    job_ids: Annotated[list[str], typer.Argument(metavar="JOB JOB …", help="Two jobs or more.")],
    evaluation: Annotated[
        str | None, typer.Option(help="Of each job: before, step-20, after; its last one.")
    ] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Which did better on the same held-out cases, with an interval, and on which cases."""
    with friendly(), Client(url) as client:
        found = client.compare(job_ids, evaluation=evaluation)
        if as_json:
            print_json(found)
            return
        table = Table(WHOLE("job"), "name", "evaluation", "cases", "pass rate", "mean reward")
        for item in found.items:
            rate = "" if item.pass_rate is None else f"{item.pass_rate:.3f}"
            table.add_row(
                item.job_id,
                escape(item.job_name),
                item.evaluation,
                str(item.count),
                rate,
                f"{item.mean_reward:.3f}",
            )
        console.print(table)
        for pair in found.pairs:
            console.print(f"{pair.second} against {pair.first}:", highlight=False)
            for line in gain_lines(pair.pass_rate, pair.reward):
                console.print(f"  {line}", highlight=False)
            for what, cases in (("better", pair.better), ("worse", pair.worse)):
                if cases:
                    console.print(f"  {what}: {escape(_some(cases))}", highlight=False)
            for note in pair.notes:
                console.print(f"  note: {escape(note)}", highlight=False)


@app.command()
def regrade(
    job_id: str,
    measures: Annotated[
        list[str] | None, typer.Argument(help="Names of measures of the suite.")
    ] = None,
    rewards: Annotated[
        Path | None, typer.Option(help="A JSON file with `rewards` as a job has them.")
    ] = None,
    suite: Annotated[
        str | None, typer.Option(help="Another version of the suite: name@version.")
    ] = None,
    phase: Annotated[
        list[str] | None, typer.Option(help="before, after, step-20, train; may be repeated.")
    ] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Grade a job's stored rollouts by other measures, without a GPU."""
    with friendly(), Client(url) as client:
        spec: dict[str, Any] = {"rewards": [*(measures or []), *_rewards_in(rewards)]}
        if not spec["rewards"]:
            raise typer.BadParameter("name measures of the suite, or give --rewards FILE")
        spec |= {"suite": suite} if suite else {}
        spec |= {"phases": phase} if phase else {}
        found = client.regrade(job_id, spec)
        if as_json:
            print_json(found)
            return
        table = Table(
            *("phase", "rollouts", "changed", "reward was", "reward is", "pass rate"),
            *("groups with spread", "turned"),
        )
        for each in found.phases:
            groups = f"{each.groups_with_spread_before} → {each.groups_with_spread}"
            table.add_row(
                each.phase,
                str(each.rollouts),
                str(each.changed),
                _number(each.mean_reward_before),
                _number(each.mean_reward),
                _number(each.pass_rate),
                f"{groups} of {each.groups}" if each.groups else "",
                str(each.turned) if each.groups else "",
            )
        console.print(table)
        for line in gain_lines(found.gain, found.reward_gain):
            console.print(line, highlight=False)
        for note in found.notes:
            console.print(f"note: {escape(note)}", highlight=False)


@app.command()
def rollouts(
    job_id: str,
    phase: Annotated[
        str | None, typer.Option(help="train, before, step-20, after; all of them.")
    ] = None,
    case: Annotated[str | None, typer.Option(help="Of this case alone.")] = None,
    failed: Annotated[
        str | None, typer.Option(metavar="MEASURE", help="Those that this measure failed.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="So many at most.")] = 5,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Read rollouts: what was asked, said and called, and what each measure made of it."""
    with friendly(), Client(url) as client:
        wanted = (
            one
            for one in _all_rollouts(client, job_id, phase)
            if case in (None, one.case_id) and (failed is None or _is_failed(one, failed))
        )
        found = list(islice(wanted, limit))
        if as_json:
            print_json([one.model_dump(mode="json") for one in found])
            return
        for one in found:
            for line in _readable(one):
                console.print(escape(line), highlight=False)


@app.command()
def metrics(
    job_id: str,
    csv: Annotated[bool, typer.Option("--csv", help="All of them, as CSV.")] = False,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """The newest value of every metric; or the whole history, as CSV or JSON."""
    with friendly(), Client(url) as client:
        if csv:
            console.file.write(client.metrics_csv(job_id))
            return
        history = client.metrics(job_id)
        if as_json:
            print_json(history)
            return
        table = Table("metric", "first", "last")
        values = [row.values for row in history.items]
        for name in sorted({name for row in values for name in row}):
            known = [row[name] for row in values if row.get(name) is not None]
            if known:
                table.add_row(name, f"{known[0]:.4g}", f"{known[-1]:.4g}")
        console.print(table)


@app.command()
def logs(
    job_id: str,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Until the job ends.")] = False,
    url: Url = DEFAULT_URL,
) -> None:
    """A job's log lines."""
    with friendly(), Client(url) as client:
        events = client.follow(job_id) if follow else client.logs(job_id)
        for event in events:
            if event.type is EventType.LOG:
                time = event.time.strftime("%H:%M:%S")
                console.print(f"{time} {escape(str(event.data['message']))}", highlight=False)


def _story(job: Job, evaluations: Evaluations) -> Iterator[str]:
    said = f": {job.message}" if job.message else ""
    reason = f" ({job.reason})" if job.reason else ""
    yield f"{job.name}  {job.id}"
    yield f"{job.status}{reason}{said}"
    yield f"{job.spec.agent.model} on {job.spec.suite}, step {job.progress.step}"
    if job.waiting:
        yield f"waits: {job.waiting.reason}"
    for change in job.adjustments:
        yield f"adjusted {change.field}: {change.requested} → {change.effective}"
    for one in evaluations.items:
        rate = "" if one.pass_rate is None else f"pass rate {one.pass_rate:.3f}, "
        yield f"{one.name}: {rate}mean reward {one.mean_reward:.3f} on {one.count} cases"
    yield from gain_lines(evaluations.gain, evaluations.reward_gain)
    yield from _flips(evaluations.items)
    for export in job.exports:
        yield f"export {export.name}: {export.status}"


def _flips(evaluations: tuple[Evaluation, ...]) -> Iterator[str]:
    known = {one.name: one.passed for one in evaluations}
    before, after = known.get("before", {}), known.get("after", {})
    common = before.keys() & after.keys()
    for what, cases in (
        ("now passed", sorted(c for c in common if after[c] and not before[c])),
        ("now failed", sorted(c for c in common if before[c] and not after[c])),
    ):
        if cases:
            yield f"{what}: {_some(cases)}"


def _some(cases: tuple[str, ...] | list[str]) -> str:
    more = f" and {len(cases) - SHOWN_CASES} more" if len(cases) > SHOWN_CASES else ""
    return f"{len(cases)} cases: {', '.join(cases[:SHOWN_CASES])}{more}"


def _all_rollouts(client: Client, job_id: str, phase: str | None) -> Iterator[Rollout]:
    cursor = None
    while True:
        page = client.rollouts(job_id, phase=phase, cursor=cursor, limit=PAGE)
        yield from page.items
        cursor = page.next_cursor
        if cursor is None:
            return


def _is_failed(rollout: Rollout, measure: str) -> bool:
    return any(v.measure == measure and (v.value or 0.0) < 1.0 for v in rollout.verdicts)


def _readable(rollout: Rollout) -> Iterator[str]:
    reward = "none" if rollout.reward is None else f"{rollout.reward:g}"
    yield f"── {rollout.id}  reward {reward}, {rollout.stop_reason}"
    for message in rollout.messages:
        text = str(message.get("content") or "").strip()
        calls = [call["function"] for call in message.get("tool_calls") or []]
        if text or not calls:
            yield f"{message['role']:>9}  {text}"
        for call in calls:
            yield f"{'call':>9}  {call['name']}({_arguments(call.get('arguments'))})"
    for verdict in rollout.verdicts:
        value = verdict.error or ("–" if verdict.value is None else f"{verdict.value:g}")
        yield f"{verdict.measure:>9}  {value}: {verdict.reason}"
    yield ""


def _arguments(given: Any) -> str:
    if not isinstance(given, dict):
        return str(given)
    return ", ".join(f"{name}={value!r}" for name, value in given.items())


def _rewards_in(path: Path | None) -> list[Any]:
    if path is None:
        return []
    try:
        content = strict_json.loads(path.read_text())
    except ValueError as error:
        raise typer.BadParameter(f"{path} is not JSON: {error}") from None
    rewards = content.get("rewards") if isinstance(content, dict) else content
    if not isinstance(rewards, list):
        raise typer.BadParameter(f"{path}: it has no list of rewards")
    return rewards


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
