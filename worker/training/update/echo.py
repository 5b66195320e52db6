"""ECHO (arXiv 2605.24517): learn from what the environment answers, in the same forward pass.

`L = L_GRPO(actions) + coeff · CE(observations)`, at temperature 1. Pure functions on tensors; the
update only calls them. Shapes: B rollouts of a generation batch, T completion tokens.
"""

from typing import Literal

import torch

Normalization = Literal["selected_tokens", "sequence_mean", "seq_mean_token_sum_norm"]


def denominator(weights_BT: torch.Tensor, normalization: Normalization, horizon: int) -> float:
    """What the sum over a whole generation batch is divided by.

    Args:
        weights_BT: Weight of each completion token; 0 for all but the selected ones.
        normalization: `selected_tokens`: mean over tokens. `sequence_mean`: mean over rollouts of
            their token means. `seq_mean_token_sum_norm`: mean over rollouts of their token sums,
            divided by the horizon.
        horizon: Longest completion in tokens.
    """
    sequences = float((weights_BT.sum(dim=1) > 0).sum())
    if normalization == "selected_tokens":
        return float(weights_BT.sum())
    if normalization == "sequence_mean":
        return sequences
    return sequences * horizon


def echo_shares(
    weights_BT: torch.Tensor, normalization: Normalization, total: float
) -> torch.Tensor:
    """What each token's −log p is multiplied by, (B, T), so that their sum is the loss.

    Shares that were given the same `total` add up to the value of the whole batch, however it is
    split.

    Args:
        weights_BT: As for `denominator`.
        normalization: As for `denominator`.
        total: The denominator of the whole batch. 0 (nothing to predict) gives 0.
    """
    if total == 0:
        return torch.zeros_like(weights_BT)
    if normalization == "sequence_mean":
        return weights_BT / weights_BT.sum(dim=1, keepdim=True).clamp(min=1e-9) / total
    return weights_BT / total
