"""Follow-up tasks on a trained model."""

from typing import Annotated, Literal

from pydantic import Field

from dressage.spec.base import Spec


class MergedExport(Spec):
    """The adapter merged into its base: a directory that loads without PEFT, as one tar."""

    type: Literal["merged"]


class GgufExport(Spec):
    """A GGUF file by llama.cpp's converter; an adapter is merged first."""

    type: Literal["gguf"]
    quantization: Literal["f32", "f16", "bf16", "q8_0"] = "q8_0"


ExportSpec = Annotated[MergedExport | GgufExport, Field(discriminator="type")]


def export_name(spec: MergedExport | GgufExport) -> str:
    """What an export is called in a job: exports of one name are the same export."""
    return f"gguf-{spec.quantization}" if isinstance(spec, GgufExport) else spec.type
