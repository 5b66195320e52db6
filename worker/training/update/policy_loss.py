"""GRPO's loss (2402.03300) for one update per batch, token by token. Pure functions on tensors.

N action tokens. The update's own probabilities are those that the rollouts are drawn with, but for
the difference between sampler and trainer: the clipped ratio of PPO is 1, and its gradient that of
the ratio.
"""

from dataclasses import dataclass

import torch

MOST = 3.0  # of an importance weight: TRL's `vllm_importance_sampling_clip_max`


@dataclass(frozen=True)
class PolicyTerms:
    """The loss of some tokens, and what is shown of it.

    Attributes:
        loss: A scalar: this part's share of the loss of the whole batch.
        divergence_N: Of each token, from the reference model; None without one.
        weights_N: By which each token's loss was corrected; None: it was not.
    """

    loss: torch.Tensor
    divergence_N: torch.Tensor | None
    weights_N: torch.Tensor | None


def policy_loss(
    logps_N: torch.Tensor,
    advantages_N: torch.Tensor,
    shares_N: torch.Tensor,
    *,
    gaps_N: torch.Tensor | None = None,
    reference_N: torch.Tensor | None = None,
    beta: float = 0.0,
) -> PolicyTerms:
    """The sum over tokens of share × ratio × (−weight × advantage + beta × divergence).

    Args:
        logps_N: Of the tokens under the weights that are trained, at the sampling temperature.
        advantages_N: Of each token's rollout.
        shares_N: What `policy_shares` gives.
        gaps_N: Trainer's less sampler's log-probability of each token; NaN where it is not known.
            The weight is its exponential, at most `MOST` (truncated importance sampling, as TRL's
            `token_truncate`); None: weights of 1.
        reference_N: Log-probabilities under the reference model.
        beta: Weight of the divergence exp(d) − d − 1 with d = reference − trained, times the ratio
            so that its gradient is unbiased (TRL's `kl` with `use_bias_correction_kl`).
    """
    ratio_N = torch.exp(logps_N - logps_N.detach())
    per_token_N = -ratio_N * advantages_N
    weights_N = None
    if gaps_N is not None:
        weights_N = torch.exp(gaps_N.nan_to_num(0.0)).clamp(max=MOST)
        per_token_N = per_token_N * weights_N
    divergence_N = None
    if reference_N is not None:
        further_N = reference_N - logps_N
        divergence_N = torch.exp(further_N) - further_N - 1
        per_token_N = per_token_N + beta * ratio_N * divergence_N
        divergence_N = divergence_N.detach()
    return PolicyTerms((per_token_N * shares_N).sum(), divergence_N, weights_N)
