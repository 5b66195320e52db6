"""Counts steps that teach nothing, and says when a run should stop spending."""

from collections.abc import Sequence

from worker.training.update.advantages import has_no_spread


class SignalGovernor:
    """Watches groups step by step.

    Args:
        patience: Steps in a row without any group that teaches; None: never.
    """

    def __init__(self, patience: int | None) -> None:
        self._patience = patience
        self.dead_steps = 0

    def observe(self, groups: Sequence[Sequence[float | None]]) -> None:
        """Take one step in. Groups that were dropped say nothing."""
        known = [group for group in groups if None not in group]
        if known:
            self.dead_steps = self.dead_steps + 1 if all(map(has_no_spread, known)) else 0

    @property
    def exhausted(self) -> bool:
        """Whether the run has gone on for too long without learning anything."""
        return self._patience is not None and self.dead_steps >= self._patience
