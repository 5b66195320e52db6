"""Files a job leaves behind."""

from datetime import datetime
from enum import StrEnum

from pydantic import Field

from dressage.spec.base import Spec


class ArtifactKind(StrEnum):
    """What a file is."""

    ADAPTER = "adapter"
    MODEL = "model"
    MERGED = "merged"
    GGUF = "gguf"
    GGUF_ADAPTER = "gguf_adapter"
    TENSORBOARD = "tensorboard"


class Artifact(Spec):
    """A downloadable file with its checksum."""

    id: str
    kind: ArtifactKind
    name: str
    size: int = Field(description="Bytes.")
    sha256: str
    created_at: datetime
