"""The rollouts of training: a step's batch, played when it is asked for, or ahead of it."""

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

from dressage.measuring.advantages import has_no_spread
from dressage.seeds import derived_seed
from dressage.spec.suite import Case
from dressage.spec.training import TrainingSpec
from worker.training.rewards.batch import RolloutBatch
from worker.training.rewards.play import play_scored
from worker.training.rewards.weighted import ScoredRollout, Scorer
from worker.training.rollout.engine import Engine
from worker.training.sampler.protocol import Draws, Sampling
from worker.training.update import ranks
from worker.training.update.flow import Flow
from worker.training.update.model_sampler import ModelSampler
from worker.training.update.order import EpochSampler

State = dict[str, Any]


class Rollouts:
    """Plays and scores groups with the model as it is, or as it was a few steps ago.

    Args:
        spec: How a job trains.
        cases: To train on.
        engine: Plays.
        scorer: Scores.
        sampler: Writes.
    """

    def __init__(
        self,
        spec: TrainingSpec,
        cases: Sequence[Case],
        engine: Engine,
        scorer: Scorer,
        sampler: ModelSampler,
    ) -> None:
        self._spec, self._cases = spec, cases
        self._engine, self._scorer, self._sampler = engine, scorer, sampler
        self._flow: Flow | None = None
        self._state: State = {}

    @property
    def end_ids(self) -> frozenset[int]:
        """The tokens that end a turn."""
        return self._sampler.end_ids

    def sampling(self, temperature: float) -> Sampling:
        """How tokens are drawn at a temperature."""
        return Sampling(temperature, self._spec.top_p, self._spec.top_k)

    def play(
        self,
        cases: Sequence[tuple[Case, int]],
        draws: Draws,
        *,
        version: int,
        state: State | None = None,
    ) -> list[ScoredRollout]:
        """One scored rollout for each (case, index in its group), by the weights as they are.

        Raises:
            RunFailure: The sampler fails, or has other weights.
        """
        sampler = self._sampler.fresh(version)

        async def together() -> list[ScoredRollout]:
            playing = play_scored(self._engine, self._scorer, cases, sampler, draws, state=state)
            scored, _ = await asyncio.gather(playing, self._sampler.check())
            return scored

        return asyncio.run(together())

    def batch(self, cases: Sequence[Case], state: State) -> RolloutBatch:
        """A step's rollouts, played now: one for each row, group members next to each other."""
        step, size = state["global_step"], self._spec.num_generations
        seed = derived_seed(self._spec.seed, "train", step)
        pairs = [(case, at % size) for at, case in enumerate(cases)]
        draws = Draws(self.sampling(self._spec.temperature), seed)
        scored = self.play(pairs, draws, version=step, state=state)
        return self._resampled(RolloutBatch(tuple(scored), size), seed, state)

    def batch_ahead(self, order: Callable[[], EpochSampler], state: State) -> RolloutBatch:
        """A step's rollouts out of those that are in flight; others are begun in their place.

        Args:
            order: Gives the order of the cases.
            state: TRL's `trainer_state`.
        """
        step = state["global_step"]
        self._state = state
        sampler = self._sampler.fresh(step)
        asyncio.run(self._sampler.check())
        if self._flow is None:
            groups = self._spec.cases_per_step

            async def play(case: Case, number: int) -> list[ScoredRollout]:
                seed = derived_seed(self._spec.seed, "flow", number)
                draws = Draws(self.sampling(self._spec.temperature), seed)
                pairs = [(case, index) for index in range(self._spec.num_generations)]
                return await play_scored(
                    self._engine, self._scorer, pairs, sampler, draws, state=self._state
                )

            self._flow = Flow(
                play,
                self._in_order(order(), begin=step * groups),
                groups=groups,
                total=(state["max_steps"] - step) * groups,
                first=step * groups,
                max_staleness=self._spec.max_staleness,
            )
        taken = self._flow.step(step)
        return RolloutBatch(tuple(one for group in taken for one in group), len(taken[0]))

    @property
    def dropped(self) -> int:
        """Groups that were too old to be trained on, so far."""
        return self._flow.dropped if self._flow else 0

    def close(self) -> None:
        """Let go of what is in flight."""
        if self._flow:
            self._flow.close()
            self._flow = None
            if self._sampler.engine:
                self._sampler.engine.drop_all()

    def _in_order(self, order: EpochSampler, *, begin: int) -> Iterator[Case]:
        place = 0
        for epoch in count():
            order.set_epoch(epoch)
            for at in list(order)[:: self._spec.num_generations]:
                if place >= begin:
                    yield self._cases[at]
                place += 1

    def _resampled(self, batch: RolloutBatch, seed: int, state: State) -> RolloutBatch:
        """Play other cases in place of groups without spread, as DAPO does (2503.14476)."""
        size, version = batch.group_size, state["global_step"]
        for attempt in range(self._spec.resample_dead_groups):
            dead = [
                at
                for at, group in enumerate(batch.groups)
                if has_no_spread([scored.reward for scored in group])
            ]
            if not dead:
                break
            own_seed = derived_seed(seed, "resample", attempt, ranks.rank())
            dead = dead[: len(self._cases)]  # each of another case: equal ones are drawn alike
            chosen = random.Random(own_seed).sample(self._cases, k=len(dead))
            pairs = [(case, index) for case in chosen for index in range(size)]
            draws = Draws(self.sampling(self._spec.temperature), own_seed)
            scored = self.play(pairs, draws, version=version, state=state)
            fresh = RolloutBatch(tuple(scored), size)
            for at, group in zip(dead, fresh.groups, strict=True):
                for one in group:  # the case may be played twice in this step
                    place = ranks.rank() * len(batch.groups) + at
                    one.rollout.resampled = f"-try-{attempt + 1}-group-{place}"
            better = {
                at: group
                for at, group in zip(dead, fresh.groups, strict=True)
                if not has_no_spread([scored.reward for scored in group])
            }
            batch = batch.with_groups(better.get)
        return batch
