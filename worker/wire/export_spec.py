"""What an export process finds in its directory."""

from typing import Literal

from pydantic import Field

from dressage.spec.artifact import ArtifactKind
from dressage.spec.base import Spec
from dressage.spec.export import ExportSpec
from dressage.spec.generation import GenerationSpec
from dressage.spec.job import JobSpec


class Question(Spec):
    """Not a file to make, but something to ask the trained agent."""

    type: Literal["generation"] = "generation"
    request: GenerationSpec


class ExportRunSpec(Spec):
    """`spec.json` of an export; the trained files and the suite lie beside it."""

    export: ExportSpec | Question
    job: JobSpec
    job_id: str
    trained: ArtifactKind
    ollama_url: str | None = Field(default=None, description="For Ollama: the server.")
    longest_prompt: int = Field(
        default=0, description="Tokens of the longest prompt that the job has played, if known."
    )
    attempt: int = Field(default=1, description="An earlier one may have got to its end unseen.")
