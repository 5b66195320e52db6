"""What a conversation says of the agent."""

from collections.abc import Sequence
from typing import Any


def final_text(said: Sequence[Any]) -> str:
    """What the model said last; empty when its last turn is a tool call or a result.

    A turn of the user after it, as rollout functions have it, is no answer.

    Args:
        said: Messages after the prompt.
    """
    last = next((message for message in reversed(said) if message["role"] != "user"), None)
    if last is None or last["role"] != "assistant" or last.get("tool_calls"):
        return ""
    return str(last.get("content") or "")
