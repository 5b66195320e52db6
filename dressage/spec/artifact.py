"""Files a job leaves behind."""

from datetime import datetime
from enum import StrEnum

from pydantic import Field

from dressage.spec.base import Spec, View


class ArtifactKind(StrEnum):
    """What a file is."""

    ADAPTER = "adapter"
    MODEL = "model"
    CHECKPOINT = "checkpoint"
    MERGED = "merged"
    GGUF = "gguf"
    GGUF_ADAPTER = "gguf_adapter"
    TENSORBOARD = "tensorboard"
    TOOLS = "tools"


def checkpoint_name(step: int) -> str:
    """The file of a checkpoint that a job keeps."""
    return f"checkpoint-{step}.tar"


def checkpoint_step(name: str) -> int:
    """The step of a checkpoint by its file's name."""
    return int(name.removeprefix("checkpoint-").removesuffix(".tar"))


class Artifact(View):
    """A downloadable file with its checksum."""

    id: str
    kind: ArtifactKind
    name: str
    size: int = Field(description="Bytes.")
    sha256: str
    created_at: datetime


class Checkpoint(Spec):
    """What training can continue from, and whether it is kept."""

    step: int
    time: datetime
    file: str | None = Field(
        default=None,
        description="Among the job's files, for download and export; null: it stays with the "
        "worker, to go on from (`training.keep_checkpoints`).",
    )
