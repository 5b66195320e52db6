"""Moves a run's files into the artifact store."""

from pathlib import Path

from app.storage import Storage
from worker.training.run_dir import Manifest


def store_files(storage: Storage, run: Path, manifest: Manifest) -> None:
    """Copy every file of a manifest in, checked against its checksum."""
    for file in manifest.files:
        storage.put_file(run / "artifacts" / file.name, file.sha256)
