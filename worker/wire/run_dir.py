"""The wire between a run and whoever started it: a directory.

`spec.json` and `suite.zip` in; `events.jsonl`, `checkpoints/`, `artifacts/`, then either
`manifest.json` (its presence means the run is complete) or `failure.json` out.
"""

import hashlib
import json
import logging
import os
import tarfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import Field

from dressage.spec.artifact import ArtifactKind
from dressage.spec.base import JSON_NUL, Spec
from dressage.spec.event import EventType
from dressage.spec.job import JobSpec
from dressage.spec.status import Reason

SPEC, SUITE, INPUT, EVENTS, MANIFEST, FAILURE = (
    *("spec.json", "suite.zip", "input.tar", "events.jsonl", "manifest.json", "failure.json"),
)
TOOLS = "tools.json"  # as the model saw them
COMPLETE = "complete.json"
PAUSE = "pause"
STACKS = "stacks-{pid}.txt"
DISK_FULL_EXIT = 28  # there was no room for the reason itself


class RunSpec(Spec):
    """What `spec.json` holds: a job's effective specification, and where to continue from."""

    job: JobSpec
    previous: tuple[str, ...] = Field(
        default=(), description="Run directories of earlier attempts, oldest first."
    )
    up_to_step: int | None = Field(
        default=None,
        description="Later checkpoints of them are not used: their history may not be stored.",
    )


class ProducedFile(Spec):
    """One artifact in `artifacts/`."""

    kind: ArtifactKind
    name: str
    size: int
    sha256: str


class FailureFile(Spec):
    """Why a run ended without a manifest."""

    reason: Reason
    message: str


class Manifest(Spec):
    """What a run leaves behind that is complete, or failed with files that are worth keeping."""

    files: tuple[ProducedFile, ...]
    result: dict[str, Any] = Field(default_factory=dict)
    failure: FailureFile | None = None


class RunDirectory:
    """Paths and whole-or-not-at-all writes.

    Of several processes of a run, the first one (rank 0) speaks for all; the others only add their
    rollouts.
    """

    def __init__(self, path: Path, *, rank: int = 0) -> None:
        self.path, self._rank = path, rank
        self.checkpoints = path / "checkpoints"
        self.artifacts = path / "artifacts"
        self.artifacts.mkdir(parents=True, exist_ok=True)
        # Unbuffered: a line is one write, so that lines of several processes do not mix.
        self._events = (path / EVENTS).open("ab", buffering=0)

    def spec(self) -> RunSpec:
        """Read `spec.json`."""
        return RunSpec.model_validate_json((self.path / SPEC).read_bytes())

    @property
    def pause_requested(self) -> bool:
        """Whether whoever started the run wants it to stop at the next step, with a checkpoint."""
        return (self.path / PAUSE).exists()

    def emit(self, type_: EventType, **data: Any) -> None:
        """Append one event. A line is written whole, so a reader sees it or does not."""
        if self._rank and type_ is not EventType.ROLLOUT:
            return
        line = {"type": type_, "time": datetime.now(UTC).isoformat(), "data": data}
        text = json.dumps(line, ensure_ascii=False, allow_nan=False)
        # A model can write NUL and half a surrogate pair; no database stores them.
        text = JSON_NUL.sub(r"\1\\ufffd", text)
        self._events.write(text.encode("utf-8", "replace") + b"\n")

    def pack(
        self,
        folder: Path,
        kind: ArtifactKind,
        *,
        name: str | None = None,
        top: str | None = None,
        without: Sequence[str] = (),
    ) -> ProducedFile:
        """Put a folder into `artifacts/` as one tar.

        Args:
            folder: What goes in.
            kind: Of the file.
            name: Of the file; after its kind unless given.
            top: The folder in the tar; the kind unless given.
            without: Patterns of names that stay out.
        """
        name = name or f"{kind}.tar"

        def write(target: BinaryIO) -> None:
            with tarfile.open(fileobj=target, mode="w") as archive:
                for file in sorted(folder.rglob("*")):
                    if not any(fnmatch(file.name, pattern) for pattern in without):
                        inside = f"{top or kind}/{file.relative_to(folder)}"
                        archive.add(file, arcname=inside, recursive=False, filter=_plain)

        write_whole(self.artifacts / name, write)
        return self.describe(name, kind)

    def describe(self, name: str, kind: ArtifactKind) -> ProducedFile:
        """Size and checksum of a file in `artifacts/`."""
        path = self.artifacts / name
        with path.open("rb") as file:
            checksum = hashlib.file_digest(file, "sha256").hexdigest()
        return ProducedFile(kind=kind, name=name, size=path.stat().st_size, sha256=checksum)

    def finish(self, manifest: Manifest) -> None:
        """Say that everything is there. The last write of a run."""
        if self._rank:
            return
        text = manifest.model_dump_json(indent=1).encode()
        write_whole(self.path / MANIFEST, lambda file: file.write(text))

    def fail(self, reason: Reason, message: str) -> None:
        """Say why there is no manifest. Of several processes the first to fail has the word."""
        text = FailureFile(reason=reason, message=message).model_dump_json().encode()
        own = self.path / f"{FAILURE}.{os.getpid()}"
        write_whole(own, lambda file: file.write(text))
        try:
            os.link(own, self.path / FAILURE)
        except FileExistsError:
            pass
        except OSError:  # a file system without links
            own.replace(self.path / FAILURE)
        own.unlink(missing_ok=True)


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file so that it is there whole or not at all, also after a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


OUR_OWN = ("worker.", "dressage.")


class EventLogHandler(logging.Handler):
    """Shows the run's own log lines, and warnings of libraries, in the job's history."""

    def __init__(self, run: RunDirectory) -> None:
        super().__init__()
        self._run = run

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record as a `log` event."""
        if record.name.startswith(OUR_OWN) or record.levelno >= logging.WARNING:
            text = record.getMessage()[:8000]
            self._run.emit(EventType.LOG, level=record.levelname.lower(), message=text)


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without who and when: equal files make equal archives."""
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member
