"""Notices when a run learns its environment by heart and stops acting."""

from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any

WINDOW = 10
LOST_ENTROPY = 0.5  # of the best
LOST_REWARD = 0.6  # standard deviations of rewards within a step
CUT = 0.5


@dataclass
class CollapseDetector:
    """Compares the last steps with the best ones before them.

    A collapse: over the last `WINDOW` steps the environment's cross-entropy is lower than in the
    window before, while the mean reward lies below its best windowed one by more than half of the
    usual deviation of rewards within a step, and action entropy has lost half of its best. The
    answer is to halve the coefficient, and to say so; it may happen again after another window.
    Rewards may have any scale and sign. A step with something that is no number says nothing.
    """

    losses: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    spreads: list[float] = field(default_factory=list)
    quiet_until: int = 2 * WINDOW

    def observe(self, *, loss: float, reward: float, spread: float, entropy: float) -> bool:
        """Take one step in. True: collapse."""
        if not all(map(isfinite, (loss, reward, spread, entropy))):
            return False
        self.spreads.append(spread)
        self.losses.append(loss)
        self.rewards.append(reward)
        self.entropies.append(entropy)
        steps = len(self.losses)
        if steps < self.quiet_until:
            return False
        fell = _last(self.losses) < _before(self.losses)
        lost = _best(self.rewards) - _last(self.rewards)
        poorer = lost > LOST_REWARD * _mean(self.spreads) > 0
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
