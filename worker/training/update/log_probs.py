"""Log-probabilities of chosen tokens: no logits of a whole batch ever lie in memory."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from worker.training.model import head_of, language_model, last_hidden_states

CHUNK = 1024  # tokens whose logits are made at once
COMPILED_CHUNK = 4096

Chunk = Callable[[torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class TokenProbabilities:
    """Of N tokens: log-probabilities with their gradient, and entropies without, in nats."""

    logps_N: torch.Tensor
    entropies_N: torch.Tensor


class TokenScorer:
    """Runs the backbone over rows of token ids and scores the tokens that are wanted.

    Args:
        model: The causal language model, an adapter's layers inside.
        compiled: Whether the head is compiled, for a GPU.
    """

    def __init__(self, model: Any, *, compiled: bool = False) -> None:
        self._base = language_model(model)
        self._head = head = head_of(self._base)

        def chunk(
            hidden: torch.Tensor, labels: torch.Tensor, temperature: float
        ) -> tuple[torch.Tensor, torch.Tensor]:
            logits = head(hidden) / temperature
            total = logits.logsumexp(dim=-1)
            logps = logits.gather(1, labels[:, None])[:, 0] - total
            with torch.no_grad():
                entropy = total - (torch.exp(logits - total[:, None]) * logits).sum(dim=-1)
            return logps, entropy

        self._compiled = compiled
        self._chunk: Chunk = torch.compile(chunk, dynamic=False) if compiled else chunk

    def hidden(self, model: Any, ids: torch.Tensor) -> torch.Tensor:
        """Hidden states that predict each token after the first, (R, W − 1, H).

        Rows are padded on the right, where no token looks: there is no attention mask, which lets
        the fastest kernels run.

        Args:
            model: As it is trained, whatever is wrapped around it.
            ids: Token ids, (R, W).
        """
        with last_hidden_states(self._base.base_model, wanted=True) as collected:
            model(input_ids=ids, use_cache=False, logits_to_keep=1)
        return collected[-1][:, :-1]

    def score(
        self, hidden_NH: torch.Tensor, labels_N: torch.Tensor, temperature: float
    ) -> TokenProbabilities:
        """The tokens that follow given hidden states.

        Logits are made in chunks, and made again for the backward pass.
        """
        count = labels_N.shape[0]
        size = COMPILED_CHUNK if self._compiled else CHUNK
        if self._compiled:  # one shape, one compilation
            missing = -count % size
            hidden_NH = torch.nn.functional.pad(hidden_NH, (0, 0, 0, missing))
            labels_N = torch.nn.functional.pad(labels_N, (0, missing))
        parts = [
            checkpoint(
                self._chunk,
                hidden_NH[at : at + size],
                labels_N[at : at + size],
                temperature,
                use_reentrant=False,
                preserve_rng_state=False,
            )
            for at in range(0, labels_N.shape[0], size)
        ]
        if not parts:  # a gradient of zero, for the head, too: other processes wait for it
            head = self._head(hidden_NH.new_zeros((1, hidden_NH.shape[1])))
            nothing = hidden_NH.sum(dim=1).float() + head.sum() * 0
            return TokenProbabilities(nothing, nothing.detach())
        logps, entropies = (torch.cat(part)[:count] for part in zip(*parts, strict=True))
        return TokenProbabilities(logps, entropies)
