"""The reward of an episode: the weighted sum of what its measures say."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from dressage.authoring.measure import AssistantMessage, MeasureContext
from dressage.measuring.combine import combined, verdicts_of
from dressage.measuring.runner import MeasureRunner
from dressage.sandbox.pool import WorkerPool
from dressage.sandbox.process import Outcome, Worker
from dressage.spec.event import MeasureVerdict
from dressage.spec.measure import RewardSpec
from worker.training.rollout.episode import Episode

T = TypeVar("T")


@dataclass(frozen=True)
class Scored:
    """An episode with its verdicts. `reward` is None when a measure failed."""

    episode: Episode
    verdicts: tuple[MeasureVerdict, ...]
    reward: float | None
    passed: bool


class Scorer:
    """Turns what a job's measures say into rewards."""

    def __init__(
        self,
        rewards: Sequence[RewardSpec],
        pool: WorkerPool,
        *,
        timeout: float,
        judge_key: str | None = None,
    ) -> None:
        self._rewards, self._pool, self._timeout = tuple(rewards), pool, timeout
        self._runner = MeasureRunner(rewards, pool, timeout=timeout, judge_key=judge_key)

    def score(self, episodes: Sequence[Episode]) -> list[Scored]:
        """Measure every episode, all side by side, and close their environments."""
        workers = [episode.worker for episode in episodes]
        try:
            outcomes = self._runner.run([_context(episode) for episode in episodes], workers)
        finally:
            self._close([worker for worker in workers if worker])
        return [
            self._scored(episode, list(verdicts))
            for episode, verdicts in zip(episodes, outcomes, strict=True)
        ]

    def _close(self, workers: list[Worker]) -> None:
        self._pool.run([(worker, {"call": "close"}) for worker in workers], self._timeout)
        for worker in workers:
            worker.kill()

    def _scored(self, episode: Episode, outcomes: list[Outcome]) -> Scored:
        verdicts = verdicts_of(self._rewards, outcomes)
        reward, passed = combined(self._rewards, verdicts)
        if episode.lost is not None:
            return Scored(episode, verdicts, None, passed=False)
        return Scored(episode, verdicts, reward, passed)


def _context(episode: Episode) -> MeasureContext:
    case = episode.case.model_dump(mode="json")
    return MeasureContext(
        input=case["input"],
        expect=case["expect"],
        metadata=case["metadata"],
        messages=episode.messages,
        final=AssistantMessage(episode.final_text),
        tool_calls=episode.tool_calls,
        stop_reason=str(episode.stop_reason),
    )


def group_rewards(rewards: Sequence[float | None], size: int) -> list[float | None]:
    """Drop whole groups in which any reward is missing.

    Args:
        rewards: Group after group, `size` each.
        size: Rollouts in a group.
    """
    return [
        None if None in group else reward for group in grouped(rewards, size) for reward in group
    ]


def grouped(items: Sequence[T], size: int) -> list[Sequence[T]]:
    """Cut what lies group after group into its groups."""
    return [items[at : at + size] for at in range(0, len(items), size)]
