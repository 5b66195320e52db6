"""Which checkpoint a run continues from, and which ones its job keeps."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from dressage.spec.artifact import ArtifactKind, checkpoint_name
from worker.wire.run_dir import COMPLETE, ProducedFile, RunDirectory, write_whole

log = logging.getLogger(__name__)

DESCRIPTION = "checkpoint-{step}.json"
# What training needs to continue, and a model does not.
NOT_OF_THE_MODEL = (
    *("optimizer*", "scheduler*", "scaler*", "rng_state*", "trainer_state.json"),
    *("training_args.bin", "echo_state.json", COMPLETE),
)


def mark_complete(checkpoint: Path) -> None:
    """Record every file's size, last of all: what has no such record was cut off."""
    sizes = {
        file.relative_to(checkpoint).as_posix(): file.stat().st_size
        for file in checkpoint.rglob("*")
        if file.is_file() and file.name != COMPLETE
    }
    write_whole(checkpoint / COMPLETE, lambda target: target.write(json.dumps(sizes).encode()))


def newest_complete(runs: Sequence[Path], *, up_to: int | None = None) -> Path | None:
    """Look through run directories, oldest first, and warn about every damaged checkpoint.

    Args:
        runs: Of earlier attempts. One whose worker has lost its lease may still be written to.
        up_to: The last step whose history is known to be stored; None: any.
    """
    found = [
        (step_of(path), path)
        for run in runs
        for path in (run / "checkpoints").glob("checkpoint-*")
        if up_to is None or step_of(path) <= up_to
    ]
    for _, path in sorted(found, key=lambda item: item[0], reverse=True):
        if _is_complete(path):
            return path
        log.warning("checkpoint %s is incomplete and was passed over", path.name)
    return None


def keep(run: RunDirectory, checkpoint: Path, kind: ArtifactKind, *, count: int) -> None:
    """Put the model of a checkpoint among the run's files, and remove all but the newest ones."""
    step = step_of(checkpoint)
    file = run.pack(
        checkpoint,
        ArtifactKind.CHECKPOINT,
        name=checkpoint_name(step),
        top=str(kind),
        without=NOT_OF_THE_MODEL,
    )
    described = run.artifacts / DESCRIPTION.format(step=step)
    write_whole(described, lambda target: target.write(file.model_dump_json().encode()))
    for old in _descriptions(run.path)[:-count]:
        old.unlink()
        old.with_suffix(".tar").unlink(missing_ok=True)


def kept(run: Path) -> tuple[ProducedFile, ...]:
    """The checkpoints among a run's files, however it ended."""
    return tuple(ProducedFile.model_validate_json(path.read_bytes()) for path in _descriptions(run))


def step_of(checkpoint: Path) -> int:
    """The optimizer step after which a checkpoint was made."""
    return int(checkpoint.name.rsplit("-", 1)[1])


def _is_complete(checkpoint: Path) -> bool:
    record = checkpoint / COMPLETE
    if not record.is_file():
        return False
    sizes: dict[str, int] = json.loads(record.read_bytes())
    return all(
        (checkpoint / name).is_file() and (checkpoint / name).stat().st_size == size
        for name, size in sizes.items()
    )


def _descriptions(run: Path) -> list[Path]:
    """Descriptions of the kept checkpoints, oldest first."""
    found = (run / "artifacts").glob(DESCRIPTION.format(step="*"))
    return sorted(found, key=lambda path: step_of(path.with_suffix("")))
