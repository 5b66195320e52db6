"""The scored rollouts of one generation batch: one shape from the engine to the loss."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dressage.measuring.advantages import has_no_spread
from dressage.seeds import derived_seed
from worker.training.rewards.record import rollout_record
from worker.training.rewards.weighted import ScoredRollout, group_rewards, grouped
from worker.training.rollout.rollout import Rollout


@dataclass(frozen=True)
class RolloutBatch:
    """Rollouts group after group, members next to each other.

    Attributes:
        scored: As many as the batch has rows.
        group_size: Rollouts of one case.
        resampled: How many groups were played in place of others that taught nothing.
    """

    scored: tuple[ScoredRollout, ...]
    group_size: int
    resampled: int = 0

    @property
    def rollouts(self) -> list[Rollout]:
        """The rollouts without their verdicts."""
        return [scored.rollout for scored in self.scored]

    @property
    def groups(self) -> list[Sequence[ScoredRollout]]:
        """The members of each group."""
        return grouped(self.scored, self.group_size)

    @property
    def rewards(self) -> list[float | None]:
        """One a rollout; None for whole groups in which any is missing."""
        return group_rewards([scored.reward for scored in self.scored], self.group_size)

    @property
    def reward_groups(self) -> list[Sequence[float | None]]:
        """The rewards by group."""
        return grouped(self.rewards, self.group_size)

    def teaching(self, *, mask_truncated: bool) -> list[bool | None]:
        """Whether each group teaches anything; None: it was dropped, which says nothing.

        A group teaches when its rewards differ and a rollout of it counts.
        """
        return [
            None
            if None in rewards
            else not has_no_spread(rewards)
            and not all(one.rollout.is_masked(truncated=mask_truncated) for one in group)
            for rewards, group in zip(self.reward_groups, self.groups, strict=True)
        ]

    def with_groups(self, fresh: Callable[[int], Sequence[ScoredRollout] | None]) -> "RolloutBatch":
        """A batch in which some groups have others in their place.

        Args:
            fresh: Given the number of a group, what replaces it; None: it stays.
        """
        groups = [(fresh(at), group) for at, group in enumerate(self.groups)]
        scored = tuple(one for new, old in groups for one in (new or old))
        resampled = self.resampled + sum(new is not None for new, _ in groups)
        return replace(self, scored=scored, resampled=resampled)

    def records(
        self, step: int, advantages: Sequence[float], *, kept: float, seed: int
    ) -> list[dict[str, Any]]:
        """Every rollout of a training step as it is stored, with its advantage.

        Args:
            step: Of the optimizer.
            advantages: One a rollout.
            kept: Share of them that is stored whole, but for the first and last of each group.
            seed: Of the choice.
        """
        found = []
        for at, (scored, advantage) in enumerate(zip(self.scored, advantages, strict=True)):
            edge = at % self.group_size in (0, self.group_size - 1)
            chance = derived_seed(seed, "keep", step, at) / 2**31
            whole = edge or chance < kept
            found.append(rollout_record(scored, "train", step, advantage, whole=whole))
        return found
