"""The reward of a rollout: the weighted sum of what its measures say."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from dressage.authoring.measure import AssistantMessage, MeasureContext
from dressage.measuring.combine import combined, may_decide, verdicts_of
from dressage.measuring.runner import MeasureRunner
from dressage.sandbox.pool import WorkerPool
from dressage.sandbox.process import Outcome
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


@dataclass(frozen=True)
class MeasuredRollout:
    """A rollout with what its measures say; None where a reward function is still to speak."""

    rollout: Rollout
    context: MeasureContext
    outcomes: list[Outcome | None]


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
        self._functions = any(reward.function is not None for reward in rewards)
        self._runner = MeasureRunner(rewards, pool, timeout=timeout, judge_key=judge_key, seed=seed)

    @property
    def decides(self) -> bool:
        """Whether any reward says that a case is solved."""
        return bool(may_decide(self._rewards))

    def score(self, rollouts: Sequence[Rollout]) -> list[ScoredRollout]:
        """Measure finished rollouts, all side by side, and close their environments."""

        async def together() -> list[ScoredRollout]:
            measured = await asyncio.gather(*map(self.measured, rollouts))
            return await self.scored(measured)

        return asyncio.run(together())

    async def measured(self, rollout: Rollout) -> "MeasuredRollout":
        """What measures say of one rollout. Its environment stays open for reward functions."""
        context = _context(rollout)
        try:
            outcomes = await self._runner.measured(context, rollout.worker)
        except BaseException:
            await self._close(rollout)
            raise
        if not self._functions:
            await self._close(rollout)
        return MeasuredRollout(rollout, context, outcomes)

    async def scored(
        self, measured: Sequence["MeasuredRollout"], *, state: dict[str, Any] | None = None
    ) -> list[ScoredRollout]:
        """With what reward functions say of all of them; their environments are closed.

        Args:
            measured: What they are shown together.
            state: TRL's `trainer_state`, for reward functions.
        """
        rollouts = [one.rollout for one in measured]
        try:
            outcomes = await self._runner.completed(
                [one.outcomes for one in measured],
                [one.context for one in measured],
                [rollout.worker for rollout in rollouts],
                completion_ids=[rollout.completion_ids for rollout in rollouts],
                state=state,
            )
        finally:
            await asyncio.gather(*map(self._close, rollouts))
        return [
            self._scored(rollout, verdicts)
            for rollout, verdicts in zip(rollouts, outcomes, strict=True)
        ]

    def logged(self) -> dict[str, list[float]]:
        """What reward functions have logged since this was asked."""
        found, self._runner.logged = self._runner.logged, defaultdict(list)
        return dict(found)

    async def _close(self, rollout: Rollout) -> None:
        worker, rollout.worker = rollout.worker, None
        if worker:
            await self._pool.call(worker, {"call": "close"}, self._timeout)
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
