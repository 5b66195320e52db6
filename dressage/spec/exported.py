"""What an export has made."""

from typing import Any

from pydantic import Field

from dressage.spec.base import Spec
from dressage.spec.merge import MergeReport
from dressage.spec.parity import ParityReport


class Registration(Spec):
    """A model in an Ollama server."""

    server: str
    name: str
    digest: str = Field(description="Of the GGUF file that was sent.")
    base: str | None = Field(default=None, description="The model under it, for an adapter.")
    parameters: dict[str, Any] = Field(
        description="Context length, stop tokens, and the sampling of the evaluation."
    )
    think: bool | None = Field(
        default=None,
        description="Send this with every chat, as it was trained; null: the model does not think.",
    )
    curl: str | None = Field(
        default=None, description="A command that asks the agent with its own tools."
    )


class ExportResult(Spec):
    """Beside its file: how it came about, and whether it is what was trained."""

    merge: MergeReport | None = Field(default=None, description="If an adapter was merged.")
    parity: tuple[ParityReport, ...] = Field(
        default=(), description="For each stage that was compared: `merged`, `gguf-…`, `ollama:…`."
    )
    ollama: Registration | None = None
