"""`dressage pull --history`: what a job did, as files that outlast the service's memory of it."""

from collections.abc import Iterator
from pathlib import Path

from dressage.cli.report import report_of
from dressage.client import Client
from dressage.client.errors import DressageError

PAGE = 100


def require_own_folder(folder: Path, job_id: str) -> None:
    """Make a folder that of one job.

    Raises:
        DressageError: It has another job's files already.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / ".dressage-job"
    owner = mark.read_text().strip() if mark.is_file() else job_id
    if owner != job_id:
        raise DressageError(f"{folder} has the files of {owner}; choose another folder with --to")
    mark.write_text(f"{job_id}\n")


def pull_history(client: Client, job_id: str, folder: Path) -> Iterator[Path]:
    """Write `report.md`, `job.json`, `metrics.csv`, `evaluations.json` and `rollouts.jsonl`.

    Each is there whole or not at all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    job, evaluations = client.job(job_id), client.evaluations(job_id)
    metrics = client.metrics_csv(job_id)
    yield _written(folder / "report.md", [report_of(job, evaluations, metrics)])
    yield _written(folder / "job.json", [job.model_dump_json(indent=1)])
    yield _written(folder / "metrics.csv", [metrics])
    yield _written(folder / "evaluations.json", [evaluations.model_dump_json(indent=1)])
    yield _written(folder / "rollouts.jsonl", _rollouts(client, job_id))


def _rollouts(client: Client, job_id: str) -> Iterator[str]:
    cursor = None
    while True:
        page = client.rollouts(job_id, cursor=cursor, limit=PAGE)
        yield from (f"{rollout.model_dump_json()}\n" for rollout in page.items)
        cursor = page.next_cursor
        if cursor is None:
            return


def _written(path: Path, pieces: Iterator[str] | list[str]) -> Path:
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.writelines(pieces)
    return partial.replace(path)
