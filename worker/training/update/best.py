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
        self._offered_at = 0
        for earlier in previous:
            if (earlier / RECORD).is_file():
                record = json.loads((earlier / RECORD).read_bytes())
                self._kept_in = earlier
                self.step, self.score = record["step"], tuple(record["score"])
                self.evaluations_since = record.get("since", 0)
                self._offered_at = record.get("offered_at", self.step)

    def offer(self, model: Any, *, step: int, score: tuple[float, float]) -> bool:
        """Keep the weights if their score is higher than any before. Says whether it is.

        A step that an earlier attempt has offered already, before it went back to its checkpoint,
        counts once.
        """
        if step <= self._offered_at:
            return step == self.step
        self._offered_at = step
        better = self.score is None or score > self.score
        if better:
            self.step, self.score, self.evaluations_since = step, score, 0
        else:
            self.evaluations_since += 1
        if ranks.rank():
            self._kept_in = self._folder if better else self._kept_in
            return better
        if better or self._kept_in != self._folder:
            weights = (
                {name: p.detach().cpu() for name, p in _trained(model)}
                if better
                else torch.load(self._kept_in / WEIGHTS, weights_only=True)
            )
            write_whole(self._folder / WEIGHTS, lambda file: torch.save(weights, file))
            self._kept_in = self._folder
        record = {
            "step": self.step,
            "score": self.score,
            "since": self.evaluations_since,
            "offered_at": step,
        }
        text = json.dumps(record).encode()
        write_whole(self._folder / RECORD, lambda file: file.write(text))
        return better

    def restore(self, model: Any) -> None:
        """Put the best weights into the model."""
        weights = torch.load(self._kept_in / WEIGHTS, weights_only=True)
        with torch.no_grad():
            for name, parameter in _trained(model):
                parameter.copy_(weights[name])


def _trained(model: Any) -> list[tuple[str, torch.Tensor]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]
