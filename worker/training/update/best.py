"""Keeps the best weights seen so far on disk, and puts them back."""

import json
from pathlib import Path
from typing import Any

import torch

from worker.training.update import ranks
from worker.wire.run_dir import write_whole

WEIGHTS, RECORD = "weights.pt", "best.json"


class BestWeights:
    """The trained parameters at the evaluation with the highest score.

    Args:
        folder: Where this attempt keeps them.
        previous: The folders of earlier attempts, oldest first: a better one there still counts.
    """

    def __init__(self, folder: Path, previous: list[Path]) -> None:
        self._folder = self._kept_in = folder
        self.step: int | None = None
        self.score: tuple[float, float] | None = None
        self.evaluations_since = 0
        for earlier in previous:
            if (earlier / RECORD).is_file():
                record = json.loads((earlier / RECORD).read_bytes())
                self._kept_in = earlier
                self.step, self.score = record["step"], tuple(record["score"])

    def offer(self, model: Any, *, step: int, score: tuple[float, float]) -> bool:
        """Keep the weights if their score is higher than any before. Says whether it is."""
        if self.score is not None and score <= self.score:
            self.evaluations_since += 1
            return False
        self.step, self.score, self.evaluations_since = step, score, 0
        self._kept_in = self._folder
        if ranks.rank():
            return True
        weights = {name: p.detach().cpu() for name, p in _trained(model)}
        write_whole(self._folder / WEIGHTS, lambda file: torch.save(weights, file))
        record = json.dumps({"step": step, "score": score}).encode()
        write_whole(self._folder / RECORD, lambda file: file.write(record))
        return True

    def restore(self, model: Any) -> None:
        """Put the best weights into the model."""
        weights = torch.load(self._kept_in / WEIGHTS, weights_only=True)
        with torch.no_grad():
            for name, parameter in _trained(model):
                parameter.copy_(weights[name])


def _trained(model: Any) -> list[tuple[str, torch.Tensor]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]
