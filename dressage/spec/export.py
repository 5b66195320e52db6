"""Follow-up tasks on a trained model."""

from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit, urlunsplit

from pydantic import BeforeValidator, Field, model_validator

from dressage.spec.base import Spec

CONVERTED = ("f32", "f16", "bf16", "q8_0")  # by the converter itself
K_QUANTS = (  # by llama-quantize
    *("q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_0", "q4_k_s", "q4_k_m", "iq4_xs"),
    *("q5_0", "q5_k_s", "q5_k_m", "q6_k"),
)


def _in_small_letters(given: Any) -> Any:
    return given.lower() if isinstance(given, str) else given


Quantization = Annotated[
    Literal[
        "f32",
        "f16",
        "bf16",
        "q8_0",
        "q2_k",
        "q3_k_s",
        "q3_k_m",
        "q3_k_l",
        "q4_0",
        "q4_k_s",
        "q4_k_m",
        "iq4_xs",
        "q5_0",
        "q5_k_s",
        "q5_k_m",
        "q6_k",
    ],
    BeforeValidator(_in_small_letters),
]
PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}"
OLLAMA_NAME = rf"^(?:{PART}(?::[0-9]{{1,5}})?/)?(?:{PART}/)?{PART}(?::{PART})?$"
ParityCases = Annotated[
    int,
    Field(
        ge=0,
        le=1000,
        description="Held-out cases that are played by the trained model and by what is served; "
        "0: no parity report.",
    ),
]


def canonical_ollama_name(name: str) -> str:
    """Equal for names that are one model for Ollama, different for all others.

    Ollama takes no notice of case; `latest` is the tag of a name without one. `~` and `+` are in no
    name, so they stand for `/` and `:` where those cannot be.

    >>> canonical_ollama_name("Team/Calc:latest")
    'team~calc'
    """
    place, _, last = name.lower().rpartition("/")
    last = last.removesuffix(":latest")
    return f"{place}/{last}".lstrip("/").replace("/", "~").replace(":", "+")


def without_secrets(url: str) -> str:
    """An address as it may be shown: without the name and password that may stand in it.

    >>> without_secrets("http://user:password@gpu-7:11434")
    'http://gpu-7:11434'
    """
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


class _Export(Spec):
    checkpoint: int | None = Field(
        default=None,
        ge=1,
        description="The step of a checkpoint that the job keeps (`training.keep_checkpoints`); "
        "its result unless given.",
    )

    @property
    def export_name(self) -> str:
        """What the export is called in its job: exports of one name are the same export."""
        raise NotImplementedError

    @property
    def file_name(self) -> str:
        """The file that it makes."""
        raise NotImplementedError

    @property
    def file_quantization(self) -> str | None:
        """The quantization of the GGUF file that it makes; None: it makes no GGUF file."""
        return None

    @property
    def adapter_field(self) -> str | None:
        """The field that asks for an adapter alone; None: the whole model is exported."""
        return None

    @property
    def _step(self) -> str:
        return f"-step-{self.checkpoint}" if self.checkpoint else ""


class MergedExport(_Export):
    """The adapter merged into its base: a directory that loads without PEFT, as one tar."""

    type: Literal["merged"]
    parity_cases: ParityCases = 0

    @property
    def export_name(self) -> str:  # noqa: D102
        return f"merged{self._step}"

    @property
    def file_name(self) -> str:  # noqa: D102
        return f"merged{self._step}.tar"


class GgufExport(_Export):
    """A GGUF file by llama.cpp's converter; an adapter is merged first."""

    type: Literal["gguf"]
    quantization: Quantization = "q8_0"
    parity_cases: ParityCases = 0

    @property
    def export_name(self) -> str:  # noqa: D102
        return f"gguf-{self.quantization}{self._step}"

    @property
    def file_name(self) -> str:  # noqa: D102
        return f"model-{self.quantization}{self._step}.gguf"

    @property
    def file_quantization(self) -> str:  # noqa: D102
        return self.quantization


class GgufAdapterExport(_Export):
    """The adapter alone as GGUF, for a server that has its base model."""

    type: Literal["gguf_adapter"]
    quantization: Annotated[
        Literal["f32", "f16", "bf16", "q8_0"], BeforeValidator(_in_small_letters)
    ] = "f16"
    parity_cases: ParityCases = 0

    @property
    def export_name(self) -> str:  # noqa: D102
        return f"gguf-adapter-{self.quantization}{self._step}"

    @property
    def file_name(self) -> str:  # noqa: D102
        return f"adapter-{self.quantization}{self._step}.gguf"

    @property
    def file_quantization(self) -> str:  # noqa: D102
        return self.quantization

    @property
    def adapter_field(self) -> str:  # noqa: D102
        return "type"


class OllamaExport(_Export):
    """A GGUF file, registered in an Ollama server under a name."""

    type: Literal["ollama"]
    name: str = Field(
        pattern=OLLAMA_NAME,
        description="`[host/][namespace/]model[:tag]`; `latest` without a tag.",
        examples=["calc-agent"],
    )
    server: str | None = Field(
        default=None,
        description="One of the operator's (`DRESSAGE_OLLAMA_URLS`); the first of them unless "
        "given.",
    )
    base: str | None = Field(
        default=None,
        pattern=OLLAMA_NAME,
        description="A model on the server that is the job's base model: the adapter alone is "
        "sent, some megabytes, and `quantization` is the adapter's.",
        examples=["qwen3:0.6b"],
    )
    quantization: Quantization | None = Field(
        default=None, description="`q8_0` unless given; `f16` for an adapter on `base`."
    )
    overwrite: bool = Field(default=False, description="Replace a model of this name.")
    system_prompt: bool = Field(
        default=False, description="Make the agent's instructions the model's system prompt."
    )
    temperature: float | None = Field(default=None, ge=0, le=5)
    num_ctx: int | None = Field(
        default=None,
        ge=64,
        le=2**20,
        description="Tokens; what the job's longest prompt and completion need unless given, and "
        "at least 4,096 or all that the model holds.",
    )
    parity_cases: ParityCases = 16
    on_problem: Literal["refuse", "flag"] = Field(
        default="refuse", description="When the parity report finds a problem."
    )

    @property
    def export_name(self) -> str:  # noqa: D102
        return f"ollama-{canonical_ollama_name(self.name)}{self._step}"

    @property
    def file_name(self) -> str:  # noqa: D102
        kind = "adapter" if self.base else "model"
        return f"{kind}-{self.file_quantization}{self._step}.gguf"

    @property
    def file_quantization(self) -> str:  # noqa: D102
        return self.quantization or ("f16" if self.base else "q8_0")

    @property
    def adapter_field(self) -> str | None:  # noqa: D102
        return "base" if self.base else None

    @model_validator(mode="after")
    def _an_adapter_has_whole_weights(self) -> Self:
        if self.base and self.quantization in K_QUANTS:
            raise ValueError("an adapter on `base` has no K-quants: leave quantization out")
        return self


ExportSpec = Annotated[
    MergedExport | GgufExport | GgufAdapterExport | OllamaExport, Field(discriminator="type")
]
