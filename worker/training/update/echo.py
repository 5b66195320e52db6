"""ECHO (arXiv 2605.24517): learn from what the environment answers, in the same forward pass.

`L = L_GRPO(actions) + coeff · CE(observations)`. Pure functions on tensors; the trainer only calls
them. Shapes: B rollouts of a micro-batch, T completion tokens, N observation tokens, H hidden size.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Normalization = Literal["selected_tokens", "sequence_mean", "seq_mean_token_sum_norm"]

CHUNK = 1024


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


def echo_cross_entropy(
    cross_entropy_BT: torch.Tensor,
    weights_BT: torch.Tensor,
    normalization: Normalization,
    total: float,
) -> torch.Tensor:
    """This micro-batch's share of the environment's cross-entropy, a scalar.

    Shares of micro-batches that were given the same `total` add up to the value of the whole batch,
    however it is split.

    Args:
        cross_entropy_BT: −log p(token) at temperature 1.
        weights_BT: As for `denominator`.
        normalization: As for `denominator`.
        total: The denominator of the whole batch. 0 (nothing to predict) gives 0.
    """
    weighted_BT = torch.where(weights_BT > 0, cross_entropy_BT * weights_BT, 0.0)
    if total == 0:
        return weighted_BT.sum() * 0.0
    if normalization == "sequence_mean":
        tokens_B = weights_BT.sum(dim=1)
        means_B = weighted_BT.sum(dim=1) / tokens_B.clamp(min=1e-9)
        return means_B.sum() / total
    return weighted_BT.sum() / total


def cross_entropy_at_one(
    hidden_NH: torch.Tensor, labels_N: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """−log p(label) at temperature 1 for selected positions, shape (N,).

    Used when sampling is not at temperature 1: the trainer's own log-probabilities are tempered
    then. Logits are made in chunks and made again for the backward pass, so that N × vocabulary
    never lies in memory.

    Args:
        hidden_NH: Last hidden states.
        labels_N: The tokens that follow.
        head: Makes logits of hidden states (`worker.training.model.Head`).
    """

    def chunk_loss(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(head(hidden).float(), labels, reduction="none")

    parts = [
        checkpoint(
            chunk_loss,
            hidden_NH[at : at + CHUNK],
            labels_N[at : at + CHUNK],
            use_reentrant=False,
            preserve_rng_state=False,
        )
        for at in range(0, hidden_NH.shape[0], CHUNK)
    ]
    return torch.cat(parts) if parts else hidden_NH.sum(dim=1)
