"""What a server answers, whichever server it is."""

import contextlib
import json
from dataclasses import dataclass

from dressage.spec.chat import Message


@dataclass(frozen=True)
class ServedAnswer:
    """One assistant message.

    Attributes:
        message: With `content` and `tool_calls`, arguments as objects.
        prompt_tokens: Tokens of the prompt, as the server counted them; None: it does not say.
        cut_off: Whether its length ended it.
    """

    message: Message
    prompt_tokens: int | None
    cut_off: bool


def is_empty(message: Message) -> bool:
    """Whether a message neither says nor calls anything."""
    return not message.get("content") and not message.get("tool_calls")


def with_object_arguments(message: Message) -> Message:
    """An assistant message whose calls have their arguments as objects, where they are JSON."""
    calls = []
    for call in message.get("tool_calls") or []:
        function = dict(call["function"])
        if isinstance(function.get("arguments"), str):
            with contextlib.suppress(ValueError):  # stays a text, which no tool takes
                function["arguments"] = json.loads(function["arguments"] or "{}")
        calls.append({**call, "function": function})
    kept = {"role": "assistant", "content": message.get("content") or ""}
    return kept | ({"tool_calls": calls} if calls else {})
