"""Does the sampler write with the weights that are trained? Asked after every hand-over.

A canary, some tokens of the suite's own, is scored by both: their log-probabilities agree but for
rounding, and lie where the trained model does, not where the base does.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from dressage.spec.status import Reason
from worker.training.process.failures import RunFailure
from worker.training.update.log_probs import TokenScorer

TOKENS = 96  # of the canary
# Nats that the mean may lie apart up to 28 layers, some times what was seen: 0.006 to 0.011 at 0.6B
# in bfloat16, 0.024 between bfloat16 and float32. It is rounding, and adds up with depth. What has
# not come along is found by the way that training has moved, long before it is as much.
MOST = {"bfloat16": 0.15, "float16": 0.05, "float32": 0.01}
LAYERS = 28
CLEARLY = 4.0  # times the first gap: what training has moved can be told from rounding
NEARER = 0.5  # of the way that training has moved


@dataclass(frozen=True)
class Gap:
    """Between sampler and trainer on the canary, in nats: mean and largest."""

    mean: float
    largest: float


class FreshnessGate:
    """Compares a sampler with the model that is trained.

    Args:
        model: As it is trained, an adapter's layers inside.
        ids: Token ids of the canary.
        dtype: Of the sampler's weights.
    """

    def __init__(self, model: Any, ids: Sequence[int], *, dtype: str) -> None:
        layers = getattr(model.config.get_text_config(), "num_hidden_layers", LAYERS)
        self.ids = list(ids)[:TOKENS]
        self._model, self._scorer = model, TokenScorer(model)
        self._most = MOST[dtype] * max(1.0, math.sqrt(layers / LAYERS))
        self._base: list[float] | None = None
        self._noise = 0.0

    @torch.no_grad()
    def trained(self) -> torch.Tensor:
        """The model's own log-probabilities of the canary, at temperature 1, (N,)."""
        ids = torch.tensor([self.ids], device=self._model.device)
        was_training = self._model.training
        self._model.eval()
        with torch.compiler.set_stance("force_eager"):
            hidden = self._scorer.hidden(self._model, ids)
            logps = self._scorer.score(hidden[0], ids[0, 1:], 1.0).logps_N
        self._model.train(was_training)
        return logps

    def check(self, trained: torch.Tensor, sampled: Sequence[float]) -> Gap:
        """Compare once.

        The first time is before training, when trained and base are one.

        Args:
            trained: What `trained` gave after the weights were handed over.
            sampled: What the sampler says of the same tokens.

        Raises:
            RunFailure: The sampler has other weights.
        """
        own = trained.float().tolist()
        gap = _apart(own, sampled)
        if self._base is None:
            self._base, self._noise = own, gap.mean
        moved = _apart(own, self._base).mean
        where = f"mean {gap.mean:.4f}, largest {gap.largest:.4f} nats on {len(own)} tokens"
        if not gap.mean <= self._most:
            raise _stale(
                f"its log-probabilities differ from the trainer's ({where}; {self._most:.4f} is "
                "what rounding may make)"
            )
        if moved > CLEARLY * max(self._noise, 1e-5) and gap.mean > NEARER * moved:
            raise _stale(
                f"training has moved the model by {moved:.4f} nats, and the sampler has not come "
                f"along ({where})"
            )
        return gap


def _apart(one: Sequence[float], other: Sequence[float]) -> Gap:
    apart = [abs(a - b) for a, b in zip(one, other, strict=True)]
    return Gap(fmean(apart), max(apart))


def _stale(how: str) -> RunFailure:
    return RunFailure(
        Reason.SAMPLER_STALE,
        f"rollouts are not written by the weights that are trained: {how}. Nothing was trained on "
        "them",
    )
