"""Serving parity: is what is served what was trained?"""

from enum import StrEnum

from pydantic import Field

from dressage.spec.base import Spec
from dressage.spec.event import Gain


class ParityProblem(StrEnum):
    """What is wrong with what is served."""

    PASS_RATE_DROP = "pass_rate_drop"
    PROMPT_DIFFERS = "prompt_differs"
    RUNS_ON = "runs_on"
    NEARER_TO_BASE = "nearer_to_base"


class PromptDifference(Spec):
    """Where a served prompt first differs from the trained one, with some text around."""

    case_id: str
    turn: int = Field(description="Of the rollout, from 0.")
    trained: str
    served: str


class ParityReport(Spec):
    """The same held-out cases, greedily, through the trained model and through what is served."""

    served: str = Field(description="`merged`, `gguf-q8_0`, `ollama:calc-agent`")
    cases: int
    pass_rate: Gain | None = Field(
        description="Served minus trained, on the same cases, with a 95 % paired interval."
    )
    same_prompt: float | None = Field(
        description="Share of prompts, every turn's, that are the trained ones as text; where a "
        "server does not show them, of first prompts with as many tokens. Null: nor that."
    )
    same_answer: float = Field(description="Share of cases with the same first turn.")
    cut_off: float = Field(description="Share of first turns that did not end by themselves.")
    kl: float | None = Field(
        default=None,
        description="Mean KL(trained ‖ served) in nats, over the likeliest next tokens at the "
        "first tokens of the trained model's answers.",
    )
    kl_base: float | None = Field(default=None, description="Mean KL(base ‖ served).")
    top_token: float | None = Field(
        default=None, description="Share of those tokens at which both find the same one likeliest."
    )
    distributions: int = Field(
        default=0, description="Next-token distributions that these three are means over."
    )
    first_difference: PromptDifference | None = None
    notes: tuple[str, ...] = Field(
        default=(), description="What could not be compared, and differences that are known."
    )
    problems: tuple[ParityProblem, ...] = Field(description="Empty: what is served was trained.")
