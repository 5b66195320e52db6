"""From scored rollouts to what an update takes: token ids, and what each token adds to the loss.

Every normalization lies in the tokens' shares, so that it does not matter which rollouts are in one
forward pass, or which are left out because they cannot teach.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from dressage.spec.event import TokenRole
from worker.training.rollout.rollout import Rollout

LossType = Literal["dapo", "grpo", "dr_grpo", "bnpo"]


@dataclass(frozen=True)
class Row:
    """One rollout in an update.

    Attributes:
        ids: Token ids of prompt and completion.
        start: Tokens of the prompt.
        policy: Share of each completion token in the policy's loss; 0 for all but actions.
        logps: What each was drawn with; NaN: not known.
        advantage: Of the rollout.
        echo: Share of each completion token in the environment's loss, without its coefficient.
    """

    ids: list[int]
    start: int
    policy: list[float]
    logps: list[float]
    advantage: float
    echo: list[float]

    def moves_policy(self, *, to_reference: bool) -> bool:
        """Whether it has a gradient of the policy's loss.

        Args:
            to_reference: Whether the loss also draws towards a reference model.
        """
        return any(self.policy) and (to_reference or self.advantage != 0)

    @property
    def observes(self) -> bool:
        """Whether it has tokens of the environment that are predicted."""
        return any(self.echo)


def rows_of(
    rollouts: Sequence[Rollout],
    advantages: Sequence[float],
    policy: Sequence[list[float]],
    echo: torch.Tensor | None,
) -> list[Row]:
    """One row a rollout.

    Args:
        rollouts: Of this process.
        advantages: One each.
        policy: What `policy_shares` gives.
        echo: What `echo_shares` gives, (B, T); None: the environment is not predicted.
    """
    return [
        Row(
            ids=rollout.prompt_ids + rollout.completion_ids,
            start=len(rollout.prompt_ids),
            policy=policy[at],
            logps=rollout.logps,
            advantage=advantages[at],
            echo=[] if echo is None else echo[at, : len(rollout.completion_ids)].tolist(),
        )
        for at, rollout in enumerate(rollouts)
    ]


def action_mask(rollout: Rollout, *, mask_truncated: bool) -> list[int]:
    """1 for each completion token that the policy is trained on, else 0."""
    hidden = rollout.is_masked(truncated=mask_truncated)
    return [int(role is TokenRole.ACTION and not hidden) for role in rollout.roles]


def policy_shares(
    masks: Sequence[list[int]],
    loss_type: LossType,
    *,
    horizon: int,
    tokens_of_all: int,
    processes: int = 1,
) -> list[list[float]]:
    """What each token's loss is multiplied by, so that their sum is the loss of the whole batch.

    As `trl.GRPOTrainer` with all rollouts of an optimizer step in one batch: `dapo` and `bnpo` are
    means over tokens (TRL's `bnpo` over those of one micro-batch, which is none of ours), `grpo` is
    the mean over rollouts of their token means, `dr_grpo` the sum over tokens by rollouts and
    horizon. Masked rollouts count where rollouts are counted.

    Args:
        masks: What `action_mask` gives, of this process.
        loss_type: The average.
        horizon: Longest completion in tokens.
        tokens_of_all: Action tokens of all processes.
        processes: Whose gradients are averaged afterwards.
    """
    rows = max(1, len(masks))
    found = []
    for mask in masks:
        if loss_type in ("dapo", "bnpo"):
            share = processes / max(1, tokens_of_all)
        elif loss_type == "grpo":
            share = 1 / (rows * max(1, sum(mask)))
        else:
            share = 1 / (rows * horizon)
        found.append([share * wanted for wanted in mask])
    return found
