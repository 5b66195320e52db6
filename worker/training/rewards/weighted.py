"""The reward of a rollout: the weighted sum of what its measures say."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from dressage.authoring.measure import AssistantMessage, MeasureContext
from dressage.measuring.combine import combined, may_decide, verdicts_of
from dressage.measuring.runner import MeasureRunner
from dressage.sandbox.pool import WorkerPool
from dressage.sandbox.process import Outcome, Worker
from dressage.spec.event import MeasureVerdict
from dressage.spec.measure import RewardSpec
from worker.training.rollout.rollout import Rollout

T = TypeVar("T")


@dataclass(frozen=True)
class ScoredRollout:
    """A rollout with its verdicts. `reward` is None when a measure failed."""

    rollout: Rollout
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
        seed: int = 0,
    ) -> None:
        self._rewards, self._pool, self._timeout = tuple(rewards), pool, timeout
        self._runner = MeasureRunner(rewards, pool, timeout=timeout, judge_key=judge_key, seed=seed)

    @property
    def decides(self) -> bool:
        """Whether any reward says that a case is solved."""
        return bool(may_decide(self._rewards))

    def score(
        self, rollouts: Sequence[Rollout], *, state: dict[str, Any] | None = None
    ) -> list[ScoredRollout]:
        """Measure every rollout, all side by side, and close their environments.

        Args:
            rollouts: Finished ones.
            state: TRL's `trainer_state`, for reward functions.
        """
        workers = [rollout.worker for rollout in rollouts]
        try:
            outcomes = self._runner.run(
                [_context(rollout) for rollout in rollouts],
                workers,
                completion_ids=[rollout.completion_ids for rollout in rollouts],
                state=state,
            )
        finally:
            self._close([worker for worker in workers if worker])
            for rollout in rollouts:
                rollout.worker = None
        return [
            self._scored(rollout, list(verdicts))
            for rollout, verdicts in zip(rollouts, outcomes, strict=True)
        ]

    def logged(self) -> dict[str, list[float]]:
        """What reward functions have logged since this was asked."""
        found, self._runner.logged = self._runner.logged, defaultdict(list)
        return dict(found)

    def _close(self, workers: list[Worker]) -> None:
        self._pool.run([(worker, {"call": "close"}) for worker in workers], self._timeout)
        for worker in workers:
            worker.kill()

    def _scored(self, rollout: Rollout, outcomes: list[Outcome]) -> ScoredRollout:
        verdicts = verdicts_of(self._rewards, outcomes)
        reward, passed = combined(self._rewards, verdicts)
        if rollout.lost is not None:
            return ScoredRollout(rollout, verdicts, None, passed=False)
        return ScoredRollout(rollout, verdicts, reward, passed)


def _context(rollout: Rollout) -> MeasureContext:
    case = rollout.case.model_dump(mode="json")
    return MeasureContext(
        input=case["input"],
        expect=case["expect"],
        metadata=case["metadata"],
        messages=rollout.messages,
        final=AssistantMessage(rollout.final_text),
        tool_calls=rollout.tool_calls,
        stop_reason=str(rollout.stop_reason),
        prompt_length=rollout.prompt_length,
        extra=rollout.extra,
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


def unscored_message(scored: Sequence[ScoredRollout]) -> str:
    """Which measure failed on every rollout, and how."""
    lost = next((s.rollout.lost for s in scored if s.rollout.lost is not None), None)
    if lost is not None:
        return f"the environment fails in every rollout: {lost}"
    failed = next((v for s in scored for v in s.verdicts if v.error), None)
    if failed is None:
        return "no reward function applies to any rollout: all of them returned None"
    every = all(any(v.error for v in s.verdicts) for s in scored)
    where = "on every rollout" if every else "in every group, which is dropped for it"
    return f"the measure {failed.measure!r} fails {where}: {failed.reason}"
