"""Which measures make up the reward: those of the suite by name, and built-in ones by type."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from dressage.spec.base import Spec

ExpectField = Annotated[
    str, Field(min_length=1, description="The entry of the case's `expect` to compare with.")
]


class ExactMatch(Spec):
    """The final message is the expected text, after Unicode normalisation and trimming."""

    type: Literal["exact_match"]
    field: ExpectField = "answer"
    case_sensitive: bool = False


class Contains(Spec):
    """The final message contains the expected text."""

    type: Literal["contains"]
    field: ExpectField = "answer"
    case_sensitive: bool = False


class RegexMatch(Spec):
    """The pattern is found in the final message (at most a second is spent on it)."""

    type: Literal["regex"]
    pattern: str = Field(min_length=1, max_length=1000)

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from None
        return pattern


class NumericCloseness(Spec):
    """The last number of the final message is close to the expected one."""

    type: Literal["numeric"]
    field: ExpectField = "answer"
    tolerance: float | None = Field(
        default=None,
        ge=0,
        description="Absolute, or relative above 1. Unless given, whole numbers must be equal, and "
        "others within 1e-6.",
    )


class JsonSchema(Spec):
    """The final message is JSON that the schema accepts."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(
        alias="schema", description="The dialect its `$schema` names, else 2020-12."
    )

    model_config = Spec.model_config | {"serialize_by_alias": True}


class ToolCalled(Spec):
    """The tool was called without an error at least this often."""

    type: Literal["tool_called"]
    tool: str = Field(min_length=1)
    times: int = Field(default=1, ge=1)


class ToolNotCalled(Spec):
    """There is an answer, and the tool was not called for it."""

    type: Literal["tool_not_called"]
    tool: str = Field(min_length=1)


class ToolSequence(Spec):
    """These tools were called in this order."""

    type: Literal["tool_sequence"]
    tools: tuple[str, ...] = Field(min_length=1)
    exact: bool = Field(default=False, description="No other call before, between or after.")


class NoToolErrors(Spec):
    """At least one tool was called, and none of the calls failed."""

    type: Literal["no_tool_errors"]


class LengthLimit(Spec):
    """There is a final message of at most so many words."""

    type: Literal["length_limit"]
    max_words: int = Field(ge=1)


class LlmJudge(Spec):
    """A language model grades the final message by a rubric, from 0 to 1."""

    type: Literal["llm_judge"]
    base_url: str = Field(
        pattern=r"^https?://[^\s]+$",
        description="Of an OpenAI-compatible endpoint that the operator allows, without "
        "`/chat/completions`.",
    )
    model: str = Field(min_length=1)
    rubric: str = Field(min_length=1, max_length=20_000, description="What makes an answer good.")
    requests_per_minute: int = Field(default=120, ge=1)
    timeout: float = Field(default=60, gt=0, le=600, description="Seconds for one request.")


BuiltinMeasure = Annotated[
    ExactMatch
    | Contains
    | RegexMatch
    | NumericCloseness
    | JsonSchema
    | ToolCalled
    | ToolNotCalled
    | ToolSequence
    | NoToolErrors
    | LengthLimit
    | LlmJudge,
    Field(discriminator="type"),
]


class RewardSpec(Spec):
    """One measure, or one reward function, and its weight in the reward."""

    measure: Annotated[str, Field(min_length=1)] | BuiltinMeasure | None = Field(
        default=None,
        description="The name of a `@measure` function in the suite, or a built-in measure.",
    )
    function: str | None = Field(
        default=None,
        min_length=1,
        description="The name of a `@reward_function` in the suite: TRL's kind, any number.",
    )
    weight: float = Field(
        default=1.0,
        allow_inf_nan=False,
        ge=-1e6,
        le=1e6,
        description="The reward is the weighted sum; a negative weight is a penalty.",
    )
    success: bool | None = Field(
        default=None,
        description="Whether it decides if a case is solved, for pass rates, gain and best "
        "weights. Unless a reward of the job says so, the measures that say pass or fail do; where "
        "all give numbers, each must reach 1.",
    )
    given_name: str | None = Field(
        default=None,
        alias="name",
        min_length=1,
        max_length=100,
        description="What it is called in metrics and verdicts, where the measure's own name would "
        "be there twice.",
    )

    model_config = Spec.model_config | {"serialize_by_alias": True}

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.measure is None) == (self.function is None):
            raise ValueError("give a measure or a function, and not both")
        return self

    @model_validator(mode="after")
    def _some_weight(self) -> Self:
        if self.weight == 0:
            raise ValueError("a weight of 0 rewards nothing; leave the measure out")
        if self.success and self.weight < 0:
            raise ValueError("a penalty does not say that a case is solved: success needs a weight")
        return self

    @property
    def name(self) -> str:
        """What it is called in metrics and verdicts."""
        measure = self.measure
        if self.given_name:
            return self.given_name
        if measure is None:
            return str(self.function)
        if isinstance(measure, str):
            return measure
        if isinstance(measure, ToolCalled | ToolNotCalled):
            return f"{measure.type}:{measure.tool}"
        return measure.type


def with_bare_names(data: Any) -> Any:
    """A request in which a bare string stands for a measure of weight 1, as in jobs."""
    if isinstance(data, dict) and isinstance(data.get("rewards"), list | tuple):
        rewards = [{"measure": r} if isinstance(r, str) else r for r in data["rewards"]]
        return {**data, "rewards": rewards}
    return data
