"""Follow-up tasks on a trained model."""

from typing import Annotated, Literal

from pydantic import Field

from dressage.spec.base import Spec

CONVERTED = ("f32", "f16", "bf16", "q8_0")  # by the converter itself
K_QUANTS = ("q2_k", "q3_k_m", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k")
Quantization = Literal[
    "f32", "f16", "bf16", "q8_0", "q2_k", "q3_k_m", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k"
]
PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}"
ParityCases = Annotated[
    int,
    Field(
        ge=0,
        le=1000,
        description="Held-out cases that are played by the trained model and by what is served; "
        "0: no parity report.",
    ),
]


class MergedExport(Spec):
    """The adapter merged into its base: a directory that loads without PEFT, as one tar."""

    type: Literal["merged"]


class GgufExport(Spec):
    """A GGUF file by llama.cpp's converter; an adapter is merged first."""

    type: Literal["gguf"]
    quantization: Quantization = "q8_0"
    parity_cases: ParityCases = 0


class GgufAdapterExport(Spec):
    """The adapter alone as GGUF, for a server that has its base model."""

    type: Literal["gguf_adapter"]
    quantization: Literal["f32", "f16", "bf16", "q8_0"] = "f16"


class OllamaExport(Spec):
    """A GGUF file, registered in an Ollama server under a name."""

    type: Literal["ollama"]
    name: str = Field(
        pattern=rf"^(?:{PART}/)?(?:{PART}/)?{PART}(?::{PART})?$",
        description="`[host/][namespace/]model[:tag]`; `latest` without a tag.",
        examples=["calc-agent"],
    )
    server: str | None = Field(
        default=None,
        description="One of the operator's (`DRESSAGE_OLLAMA_URLS`); the first of them unless "
        "given.",
    )
    quantization: Quantization = "q8_0"
    overwrite: bool = Field(default=False, description="Replace a model of this name.")
    system_prompt: bool = Field(
        default=False, description="Make the agent's instructions the model's system prompt."
    )
    temperature: float | None = Field(default=None, ge=0, le=5)
    num_ctx: int | None = Field(
        default=None,
        ge=64,
        le=2**20,
        description="Tokens; the job's longest prompt plus completion unless given.",
    )
    parity_cases: ParityCases = 16
    on_problem: Literal["refuse", "flag"] = Field(
        default="refuse", description="When the parity report finds a problem."
    )


ExportSpec = Annotated[
    MergedExport | GgufExport | GgufAdapterExport | OllamaExport, Field(discriminator="type")
]


def export_name(spec: ExportSpec) -> str:
    """What an export is called in a job: exports of one name are the same export."""
    if isinstance(spec, OllamaExport):
        return "ollama-" + spec.name.replace("/", "_").replace(":", "_")
    if isinstance(spec, GgufAdapterExport):
        return f"gguf-adapter-{spec.quantization}"
    return f"gguf-{spec.quantization}" if isinstance(spec, GgufExport) else spec.type
