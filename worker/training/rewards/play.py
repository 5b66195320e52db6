"""Plays rollouts and scores each as soon as it has ended."""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any

from dressage.spec.suite import Case
from worker.training.rewards.weighted import MeasuredRollout, ScoredRollout, Scorer
from worker.training.rollout.engine import Engine
from worker.training.rollout.rollout import Rollout
from worker.training.sampler.protocol import Draws, Sampler


async def play_scored(
    engine: Engine,
    scorer: Scorer,
    cases: Sequence[tuple[Case, int]],
    sampler: Sampler,
    draws: Draws,
    *,
    state: dict[str, Any] | None = None,
) -> list[ScoredRollout]:
    """One scored rollout for each (case, index in its group); reward functions see them together.

    Raises:
        RunFailure: The sampler, or a rollout function, is unusable.
    """

    async def measured(playing: Awaitable[Rollout]) -> MeasuredRollout:
        return await scorer.measured(await playing)

    playing = engine.start(cases, sampler, draws)
    return await scorer.scored(await asyncio.gather(*map(measured, playing)), state=state)
