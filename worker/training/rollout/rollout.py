"""One rollout while and after it is played."""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from dressage.authoring.measure import ToolCall
from dressage.measuring.conversation import final_text
from dressage.sandbox.process import Worker
from dressage.spec.chat import Message
from dressage.spec.event import TokenRole
from dressage.spec.suite import Case
from worker.training.sampler.protocol import Sampled

Origin = tuple[int, int]


class StopReason(StrEnum):
    """Why a rollout ended."""

    COMPLETED = "completed"
    MAX_COMPLETION_LENGTH = "max_completion_length"
    MAX_TOOL_ITERATIONS = "max_tool_iterations"
    ENVIRONMENT_LOST = "environment_lost"


@dataclass(frozen=True)
class Suffix:
    """What comes between two assistant turns.

    Attributes:
        ids: Token ids.
        roles: One for each token.
        origins: For each token of a body: which result it belongs to, and at which character.
        bodies: The results as the template writes them.
        escaped: How often markup spelled inside a body was broken up.
    """

    ids: list[int]
    roles: list[TokenRole]
    origins: list[Origin | None]
    bodies: list[str]
    escaped: int


@dataclass
class Rollout:
    """A rollout in the making.

    Attributes:
        case: What it plays.
        index: Position in its group.
        messages: The conversation so far, prompt included.
        prompt_ids: Token ids of the prompt.
        completion_ids: Everything after the prompt: actions, observations, scaffold.
        roles: One role for each of `completion_ids`.
        logps: For each of them the log-probability it was drawn with; NaN for what was not drawn.
        versions: For each of them the version of the weights that wrote it; −1 likewise.
        origins: For each of them: which entry of `observed` it belongs to, and at which character;
            None for what no tool wrote.
        observed: The results that were shown, by tool, as the template writes them.
        unshown_results: Results that there was no room for: the rollout ended before them.
        worker: The process of the rollout's environment, if it has one.
        lost: Why the environment failed. Such a rollout is never scored.
        resampled: Which try in place of a group without spread it belongs to, if any.
        extra: What a rollout function returned beside it, by name.
        prompt_length: How many of `messages` are the prompt.
    """

    case: Case
    index: int
    messages: list[Message]
    prompt_ids: list[int]
    completion_ids: list[int] = field(default_factory=list)
    roles: list[TokenRole] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    origins: list[Origin | None] = field(default_factory=list)
    observed: list[tuple[str, str]] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)
    tool_failures: int = 0
    escaped_markup: int = 0
    unshown_results: int = 0
    iterations: int = 0
    stop_reason: StopReason | None = None
    worker: Worker | None = None
    lost: str | None = None
    resampled: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    prompt_length: int = 0

    def __post_init__(self) -> None:
        """Before anything is played the conversation is the prompt, unless it is given."""
        self.prompt_length = self.prompt_length or len(self.messages)
        self._add_undrawn(len(self.completion_ids) - len(self.logps))

    def append(self, ids: list[int], roles: list[TokenRole]) -> None:
        """Add tokens with their roles."""
        self.completion_ids += ids
        self.roles += roles
        self.origins += [None] * len(ids)
        self._add_undrawn(len(ids))

    def append_action(self, sampled: Sampled) -> None:
        """Add what the model wrote."""
        self.completion_ids += sampled.ids
        self.roles += [TokenRole.ACTION] * len(sampled.ids)
        self.origins += [None] * len(sampled.ids)
        self.logps += sampled.logps
        self.versions += sampled.versions

    def append_results(self, suffix: Suffix, tools: list[str]) -> None:
        """Add what tools answered, and the markup around it."""
        first = len(self.observed)
        self.completion_ids += suffix.ids
        self.roles += suffix.roles
        self._add_undrawn(len(suffix.ids))
        self.origins += [o and (first + o[0], o[1]) for o in suffix.origins]
        self.observed += zip(tools, suffix.bodies, strict=True)
        self.escaped_markup += suffix.escaped

    @property
    def truncated(self) -> bool:
        """Whether it was cut off by its token budget."""
        return self.stop_reason is StopReason.MAX_COMPLETION_LENGTH

    def _add_undrawn(self, count: int) -> None:
        """What no model of ours has written has no log-probability."""
        self.logps += [math.nan] * count
        self.versions += [-1] * count

    @property
    def oldest_version(self) -> int | None:
        """The oldest weights that wrote any of its tokens; None: it is not known."""
        return min((version for version in self.versions if version >= 0), default=None)

    def is_masked(self, *, truncated: bool) -> bool:
        """Whether it teaches nothing: it is lost, or cut and cut ones shall not teach."""
        return self.lost is not None or (truncated and self.truncated)

    @property
    def final_text(self) -> str:
        """What the model said last; see `dressage.measuring.conversation`."""
        return final_text(self.messages[self.prompt_length :])
