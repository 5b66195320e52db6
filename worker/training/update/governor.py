"""Counts steps that teach nothing, and says when a run should stop spending."""

from collections.abc import Sequence


class SignalGovernor:
    """Watches groups step by step.

    Args:
        patience: Steps in a row without any group that teaches; None: never.
    """

    def __init__(self, patience: int | None) -> None:
        self._patience = patience
        self.dead_steps = 0

    def observe(self, teaching: Sequence[bool | None]) -> None:
        """Take one step in: whether each group teaches. Dropped ones (None) say nothing."""
        known = [group for group in teaching if group is not None]
        if known:
            self.dead_steps = 0 if any(known) else self.dead_steps + 1

    @property
    def exhausted(self) -> bool:
        """Whether the run has gone on for too long without learning anything."""
        return self._patience is not None and self.dead_steps >= self._patience
