"""Notices when a run learns its environment by heart and stops acting."""

from dataclasses import asdict, dataclass, field
from typing import Any

WINDOW = 10
LOST_ENTROPY = 0.5
LOST_REWARD = 0.5
CUT = 0.5


@dataclass
class CollapseDetector:
    """Compares the last steps with the best ones before them.

    A collapse: over the last `WINDOW` steps the environment's cross-entropy is lower than in the
    window before, while reward has lost half of its best windowed mean and action entropy half of
    its own. The answer is to halve the coefficient, and to say so; it may happen again after
    another window.
    """

    losses: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    quiet_until: int = 2 * WINDOW

    def observe(self, *, loss: float, reward: float, entropy: float) -> bool:
        """Take one step in. True: collapse."""
        self.losses.append(loss)
        self.rewards.append(reward)
        self.entropies.append(entropy)
        steps = len(self.losses)
        if steps < self.quiet_until:
            return False
        fell = _last(self.losses) < _before(self.losses)
        poorer = _last(self.rewards) < LOST_REWARD * _best(self.rewards)
        narrower = _last(self.entropies) < LOST_ENTROPY * _best(self.entropies)
        if fell and poorer and narrower:
            self.quiet_until = steps + WINDOW
            return True
        return False

    def state(self) -> dict[str, Any]:
        """The detector's memory, for a checkpoint."""
        return asdict(self)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _last(values: list[float]) -> float:
    return _mean(values[-WINDOW:])


def _before(values: list[float]) -> float:
    return _mean(values[-2 * WINDOW : -WINDOW])


def _best(values: list[float]) -> float:
    return max(_mean(values[at : at + WINDOW]) for at in range(len(values) - WINDOW + 1))
