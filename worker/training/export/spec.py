"""What an export process finds in its directory."""

from typing import Any, Literal

from pydantic import Field

from dressage.spec.artifact import ArtifactKind
from dressage.spec.base import Spec
from dressage.spec.export import ExportSpec
from dressage.spec.generation import GenerationSpec
from dressage.spec.job import JobSpec


class Question(Spec):
    """Not a file to make, but something to ask the trained agent. The suite lies beside."""

    type: Literal["generation"] = "generation"
    request: GenerationSpec
    job: JobSpec


class ExportRunSpec(Spec):
    """`spec.json` of an export; the trained files lie beside it as `input.tar`."""

    export: ExportSpec | Question
    base_model: str
    trained: ArtifactKind
    messages: tuple[dict[str, Any], ...] = Field(description="A prompt the result must answer.")
    tools: tuple[dict[str, Any], ...] = Field(default=(), description="Schemas for that prompt.")
    context_length: int = Field(description="Tokens: the longest prompt plus completion.")
