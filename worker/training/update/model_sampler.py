"""The sampler of the model that is trained, with its weights as they are now."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from worker.training.sampler.hand_over import sources
from worker.training.sampler.local import TransformersSampler
from worker.training.sampler.protocol import Sampler
from worker.training.sampler.vllm import VllmSampler
from worker.training.update.freshness import FreshnessGate


class ModelSampler:
    """Hands weights over before they are asked for, and looks whether they have arrived.

    Args:
        model: The policy, an adapter's layers inside.
        tokenizer: Its tokenizer.
        rows: Continuations side by side where the model itself writes.
        engine: What writes instead; None: the model itself.
        canary: Token ids that both are asked about.
        dtype: Of the engine's weights.
        sleeps: Whether the engine gives its memory back while the model is trained.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        rows: int,
        engine: VllmSampler | None,
        canary: Sequence[int],
        dtype: str,
        sleeps: bool = False,
    ) -> None:
        self._model, self._tokenizer, self._rows = model, tokenizer, rows
        self.engine, self._sleeps = engine, sleeps
        self._noted: dict[str, float] = {}
        self._gate = FreshnessGate(model, canary, dtype=dtype) if engine else None
        self.attach()

    def attach(self) -> None:
        """Tell the engine where the weights lie."""
        if self.engine:
            self.engine.attach(sources(self._model))

    @property
    def end_ids(self) -> frozenset[int]:
        """The tokens that end a turn."""
        return (self.engine or self._own(0)).end_ids

    def fresh(self, version: int) -> Sampler:
        """A sampler with the weights as they are now.

        Args:
            version: Of the weights: the optimizer steps behind them.
        """
        if self.engine is None:
            return self._own(version)
        started = time.monotonic()
        _wait_for(self._model.device)
        self.engine.load_weights(version)
        self._noted["time/hand_over"] = time.monotonic() - started
        return self.engine

    async def check(self) -> None:
        """Compare sampler and trainer after a hand-over.

        Raises:
            RunFailure: The sampler has other weights.
        """
        if self.engine is None or self._gate is None:
            return
        trained = self._gate.trained()  # the card is still at it while the engine is asked
        gap = self._gate.check(trained, await self.engine.score(self._gate.ids))
        self._noted["sampling/canary_gap/mean"] = gap.mean
        self._noted["sampling/canary_gap/max"] = gap.largest

    @contextmanager
    def asleep(self) -> Iterator[None]:
        """While the model is trained: the engine's memory is given back, if that is wanted."""
        if self.engine is None or not self._sleeps:
            yield
            return
        self.engine.sleep()
        try:
            yield
        finally:
            self.engine.wake()

    def _own(self, version: int) -> TransformersSampler:
        return TransformersSampler(self._model, self._tokenizer, rows=self._rows, version=version)

    def close(self) -> None:
        """End the engine."""
        if self.engine:
            self.engine.close()

    def noted(self) -> dict[str, float]:
        """Metrics since this was asked."""
        found, self._noted = self._noted, {}
        return found


def _wait_for(device: Any) -> None:
    """Another process reads the weights: what was begun here must have been done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
