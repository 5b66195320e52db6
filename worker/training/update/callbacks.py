"""What happens between optimizer steps."""

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback


class EverySteps(TrainerCallback):
    """Calls a function every so many optimizer steps, but not after the last one."""

    def __init__(self, every: int, action: Callable[[int], None]) -> None:
        self._every, self._action = every, action

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Call it if it is time."""
        if state.global_step % self._every == 0 and state.global_step < state.max_steps:
            self._action(state.global_step)
