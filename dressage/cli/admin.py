"""What operators do: keys, teams, usage, audit."""

from datetime import datetime
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from dressage.cli.console import WHOLE, AsJson, Url, console, errors, friendly, print_json
from dressage.client import Client
from dressage.client.client import DEFAULT_URL
from dressage.client.config import store_key, stored_key
from dressage.spec.team import KeySpec, Role, Team, UsageBy

app = typer.Typer()
keys = typer.Typer(no_args_is_help=True, help="Make, list and revoke API keys.")
teams = typer.Typer(no_args_is_help=True, help="Teams that share the GPUs, and their limits.")
app.add_typer(keys, name="keys")
app.add_typer(teams, name="teams")


@app.command()
def usage(
    url: Url = DEFAULT_URL,
    by: UsageBy = UsageBy.TEAM,
    since: Annotated[datetime | None, typer.Option(help="30 days ago unless given.")] = None,
    csv: Annotated[bool, typer.Option(help="Print CSV.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show GPU time by team, job or attempt."""
    with friendly(), Client(url) as client:
        start = since.astimezone().isoformat() if since else None
        if csv:
            print(client.usage_csv(by=by, since=start), end="")  # noqa: T201  for other programs
            return
        found = client.usage(by=by, since=start)
        if as_json:
            print_json(found)
            return
        table = Table("team", WHOLE("job"), "attempts", "GPU hours", "hours")
        for row in found.items:
            table.add_row(
                row.team,
                f"{row.job_id or ''}{f' #{row.attempt}' if row.attempt else ''}",
                str(row.attempts),
                f"{row.gpu_seconds / 3600:.2f}",
                f"{row.seconds / 3600:.2f}",
            )
        console.print(table)


@app.command()
def audit(url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show who changed what, newest first."""
    with friendly(), Client(url) as client:
        found = client.audit()
        if as_json:
            print_json(found)
            return
        table = Table("time", "team", WHOLE("key"), "action", "on")
        for entry in found.items:
            time = entry.time.strftime("%Y-%m-%d %H:%M:%S")
            table.add_row(time, entry.team, entry.key_id, entry.action, escape(entry.target))
        console.print(table)


@keys.command("create")
def create_key(
    team: Annotated[str, typer.Option(help="Whose key it is.")],
    role: Role = Role.SUBMITTER,
    name: Annotated[str, typer.Option(help="Who or what uses it.")] = "",
    expires: Annotated[datetime | None, typer.Option(help="When it ends.")] = None,
    requests_per_minute: int | None = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Make a key. It is shown once."""
    with friendly(), Client(url) as client:
        made = client.create_key(
            KeySpec(
                team=team,
                role=role,
                name=name,
                expires_at=expires.astimezone() if expires else None,
                requests_per_minute=requests_per_minute,
            )
        )
        if as_json:
            print_json(made)
            return
        errors.print(f"{made.id}: shown once, keep it", highlight=False)
        print(made.secret)  # noqa: T201  alone on its line, for other programs


@keys.command("list")
def list_keys(url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """List keys, newest first."""
    with friendly(), Client(url) as client:
        found = client.keys()
        if as_json:
            print_json(found)
            return
        table = Table(WHOLE("id"), "team", "role", "name", "begins with", "state")
        for key in found.items:
            state = "revoked" if key.revoked_at else "valid"
            if key.expires_at and not key.revoked_at:
                state = f"until {key.expires_at:%Y-%m-%d %H:%M}"
            table.add_row(key.id, key.team, key.role, escape(key.name), key.prefix, state)
        console.print(table)


@keys.command("revoke")
def revoke_key(key_id: str, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """End a key, for good."""
    with friendly(), Client(url) as client:
        key = client.revoke_key(key_id)
        if as_json:
            print_json(key)
            return
        console.print(f"{key_id} is revoked", highlight=False)


@keys.command("use")
def use_key(
    key: Annotated[str, typer.Argument(help="The secret, `drs_…`.")], url: Url = DEFAULT_URL
) -> None:
    """Keep a key in the config file, for this service."""
    console.print(f"kept in {store_key(url, key)}", highlight=False, soft_wrap=True)


@keys.command("show")
def show_key(url: Url = DEFAULT_URL) -> None:
    """Print the key that commands use for this service."""
    key = stored_key(url)
    if key is None:
        errors.print(f"no key for {url}; keep one with `dressage keys use`", highlight=False)
        raise typer.Exit(1)
    print(key)  # noqa: T201  for other programs


@teams.command("set")
def set_team(
    name: str,
    weight: float | None = None,
    max_running_gpus: int | None = None,
    max_queued_jobs: int | None = None,
    gpu_hours_per_day: float | None = None,
    gpu_hours_per_month: float | None = None,
    max_storage_gb: float | None = None,
    keep_files_days: float | None = None,
    no_limit: Annotated[
        list[str] | None, typer.Option(help="Take a limit away, as `--no-limit max-queued-jobs`.")
    ] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Make a team, or change some of its limits; what is left out stays as it is."""
    given: dict[str, float | None] = {
        "weight": weight,
        "max_running_gpus": max_running_gpus,
        "max_queued_jobs": max_queued_jobs,
        "gpu_hours_per_day": gpu_hours_per_day,
        "gpu_hours_per_month": gpu_hours_per_month,
        "max_storage_gb": max_storage_gb,
        "keep_files_days": keep_files_days,
    }
    changes: dict[str, float | None] = {
        option: value for option, value in given.items() if value is not None
    }
    for option in no_limit or []:
        field = option.strip("-").replace("-", "_")
        if field not in given or field == "weight":
            names = ", ".join(o.replace("_", "-") for o in given if o != "weight")
            raise typer.BadParameter(f"there is no limit {option!r}; there are {names}")
        changes[field] = None
    limits = dict(_stored(option, value) for option, value in changes.items())
    with friendly(), Client(url) as client:
        team = client.set_team(name, limits)
        if as_json:
            print_json(team)
            return
        console.print(f"team {team.name}: {_limits(team)}", highlight=False)


@teams.command("list")
def list_teams(url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """List teams with their limits and what they use now."""
    with friendly(), Client(url) as client:
        found = client.teams()
        if as_json:
            print_json(found)
            return
        table = Table("team", "weight", "running GPUs", "queued jobs", "storage", "other limits")
        for team in found:
            table.add_row(
                team.name,
                f"{team.weight:g}",
                _of(team.running_gpus, team.max_running_gpus),
                _of(team.queued_jobs, team.max_queued_jobs),
                f"{team.storage_bytes / 1e9:.2f} GB"
                + (f" of {team.max_storage_bytes / 1e9:g}" if team.max_storage_bytes else ""),
                _budgets(team) or "none",
            )
        console.print(table)


def _stored(option: str, value: float | None) -> tuple[str, float | None]:
    """An option in the units of the API."""
    if option.startswith("gpu_hours"):
        return option.replace("hours", "seconds"), None if value is None else value * 3600
    if option == "max_storage_gb":
        return "max_storage_bytes", None if value is None else int(value * 1e9)
    return option, value


def _limits(team: Team) -> str:
    counts = {
        "running GPUs": team.max_running_gpus,
        "queued jobs": team.max_queued_jobs,
        "bytes": team.max_storage_bytes,
    }
    shown = [f"{value} {what}" for what, value in counts.items() if value is not None]
    return ", ".join([f"weight {team.weight:g}", *shown, *filter(None, [_budgets(team)])])


def _budgets(team: Team) -> str:
    budgets = {
        "GPU hours a day": team.gpu_seconds_per_day,
        "GPU hours a month": team.gpu_seconds_per_month,
    }
    shown = [f"{v / 3600:g} {what}" for what, v in budgets.items() if v is not None]
    days = team.keep_files_days
    return ", ".join([*shown, *([] if days is None else [f"files kept {days:g} days"])])


def _of(used: int, limit: int | None) -> str:
    return str(used) if limit is None else f"{used} of {limit}"
