"""The agent as data: a model, static instructions and tool names."""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from dressage.spec.base import Spec
from dressage.spec.chat import ToolFunction
from dressage.spec.tool_schema import for_ollama


def canonical_model_name(name: str) -> str:
    """Reduce every spelling of a hub model that teams use to `Org/Name`.

    A litellm or Ollama prefix, `hf.co/`, a quantization tag and the `-GGUF` suffix are dropped; the
    path of a local directory (absolute, or starting with `.` or `~`) is returned as it is.

    >>> canonical_model_name("litellm/ollama_chat/hf.co/Org/Name-GGUF:Q8_0")
    'Org/Name'
    """
    name = name.strip()
    if name.startswith(("/", ".", "~")):
        return name
    name = re.sub(r"^litellm/", "", name)
    name = re.sub(r"^(?:ollama_chat|ollama)/", "", name)
    name = re.sub(r"^huggingface/(?=[^/]+/)", "", name)  # of itself an owner, too
    name = re.sub(r"^(?:https?://)?(?:hf\.co|huggingface\.co)/", "", name)
    name = name.split(":", 1)[0]
    return re.sub(r"-GGUF$", "", name, flags=re.IGNORECASE)


def _static_text(value: Any) -> Any:
    if value is not None and not isinstance(value, str):
        kind = "a callable" if callable(value) else f"a {type(value).__name__}"
        raise ValueError(f"instructions must be a static string, not {kind}")
    return value


class AgentSpec(Spec):
    """What is trained: a model with its instructions and tools."""

    model: str = Field(
        min_length=1,
        max_length=1000,
        description="Hub name (`Org/Name`, also in litellm, Ollama or GGUF spelling) or the path "
        "of a model directory that the workers can read.",
        examples=["Qwen/Qwen3-0.6B"],
    )
    instructions: Annotated[str | None, BeforeValidator(_static_text)] = Field(
        default=None,
        max_length=100_000,
        description="System prompt, the same for all cases.",
    )
    tools: tuple[str, ...] = Field(
        default=(), description="Names of `@function_tool` functions in the suite's code."
    )
    environment: str | None = Field(
        default=None,
        description="An `Environment` class in the suite's code; its tools are the agent's.",
    )

    rollout_func: str | None = Field(
        default=None,
        description="A `@rollout_func` of the suite's code that plays the rollouts itself; instead "
        "of tools and environment.",
    )
    response_template: dict[str, Any] | None = Field(
        default=None,
        description="How tool calls are found in what the model writes, in the words of "
        "transformers' `response_template`; for families whose template is not known.",
    )

    thinking: bool | None = Field(
        default=None,
        description="The chat template's `enable_thinking`; its own default unless given.",
    )

    tool_schema: Literal["whole", "ollama"] = Field(
        default="whole",
        description="What the model is shown of a tool's schema: all of it, or what Ollama shows "
        "(no `default`, `minimum`, `additionalProperties` …), which an export to Ollama asks for.",
    )

    def tool_schemas(
        self, tools: Sequence[ToolFunction], environments: Sequence[dict[str, Any]]
    ) -> list[ToolFunction]:
        """What the model is shown, in this order.

        Args:
            tools: Schemas of all tools in the suite's code.
            environments: All its environments, each with its `name` and `tools`.

        Raises:
            KeyError: The code has no such tool or environment.
        """
        if self.environment:
            found = list({e["name"]: e["tools"] for e in environments}[self.environment])
        else:
            by_name = {tool["name"]: tool for tool in tools}
            found = [by_name[name] for name in self.tools]
        return [for_ollama(tool)[0] for tool in found] if self.tool_schema == "ollama" else found

    @model_validator(mode="after")
    def _one_source_of_tools(self) -> Self:
        if self.environment and self.tools:
            raise ValueError(
                "the environment's tools are the agent's: leave agent.tools out, or the environment"
            )
        if self.rollout_func and (self.environment or self.tools):
            raise ValueError("a rollout_func plays alone: leave tools and environment out")
        return self

    @field_validator("model")
    @classmethod
    def _has_an_owner(cls, name: str) -> str:
        canonical = canonical_model_name(name)
        if re.match(r"(?:litellm/)?(?:ollama_chat|ollama)/", name) and "/" not in canonical:
            raise ValueError(
                f"{name!r} is a name of Ollama's library; give the model's name on the hub, "
                "Org/Name, or hf.co/Org/Name-GGUF"
            )
        return name

    @field_validator("tools")
    @classmethod
    def _no_tool_twice(cls, tools: tuple[str, ...]) -> tuple[str, ...]:
        twice = sorted({name for name in tools if tools.count(name) > 1})
        if twice:
            raise ValueError(f"named more than once: {', '.join(twice)}")
        return tools
