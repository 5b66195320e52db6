"""`POST /jobs/{id}/generate`: ask a trained agent."""

from datetime import datetime
from typing import Any, Self

from pydantic import Field, model_validator

from dressage.spec.base import Spec, View
from dressage.spec.status import ExportStatus, Reason
from dressage.spec.suite import ChatMessage


class GenerationSpec(Spec):
    """A prompt, with the agent's own tools and instructions unless others are given."""

    prompt: str | None = Field(default=None, min_length=1, description="One user message.")
    messages: tuple[ChatMessage, ...] | None = Field(
        default=None, description="Or a conversation that ends with the user."
    )
    case_id: str | None = Field(
        default=None, description="Or a case of the suite; environments need one."
    )
    instructions: str | None = Field(
        default=None, description="Instead of the agent's; an empty text: none."
    )
    tools: tuple[str, ...] | None = Field(
        default=None, description="Instead of the agent's; of the same suite."
    )
    execute_tools: bool = Field(
        default=False, description="Run the calls and let the model go on, as in training."
    )
    max_new_tokens: int = Field(default=256, ge=1, le=32_768, description="In one turn.")
    temperature: float = Field(default=0.7, ge=0, le=5, description="0: greedy.")
    repetition_penalty: float = Field(default=1.2, gt=0, le=5)
    seed: int = Field(default=0, ge=0, lt=2**31)

    @model_validator(mode="after")
    def _one_question(self) -> Self:
        given = [value for value in (self.prompt, self.messages, self.case_id) if value is not None]
        if len(given) != 1:
            raise ValueError("give one of prompt, messages and case_id")
        if self.messages is not None and (not self.messages or self.messages[-1].role != "user"):
            raise ValueError("messages must end with a user message")
        return self


class GeneratedAnswer(Spec):
    """What the agent wrote."""

    answer: str = Field(description="The final message, without what it thought.")
    thinking: str | None = None
    tool_calls: tuple[dict[str, Any], ...] = Field(
        default=(), description="Name, arguments; result and error when they were executed."
    )
    messages: tuple[dict[str, Any], ...] = Field(description="The whole conversation.")
    stop_reason: str
    prompt_tokens: int
    completion_tokens: int


class Generation(View):
    """A generation as the service shows it."""

    id: str
    job_id: str
    status: ExportStatus
    reason: Reason | None = None
    message: str | None = None
    result: GeneratedAnswer | None = None
    created_at: datetime
    finished_at: datetime | None = None
