"""The reward of an episode: the weighted sum of what its measures say."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dressage.authoring.measure import AssistantMessage, MeasureContext
from dressage.sandbox.pool import WorkerPool
from dressage.sandbox.process import Failure, Outcome, Worker
from dressage.spec.event import MeasureVerdict
from dressage.spec.measure import BuiltinMeasure, RewardSpec
from worker.training.measures.builtin import MissingExpectation, evaluate
from worker.training.rollout.episode import Episode


@dataclass(frozen=True)
class Scored:
    """An episode with its verdicts. `reward` is None when a measure failed."""

    episode: Episode
    verdicts: tuple[MeasureVerdict, ...]
    reward: float | None
    passed: bool


class Scorer:
    """Runs a job's measures in the sandbox."""

    def __init__(self, rewards: Sequence[RewardSpec], pool: WorkerPool, *, timeout: float) -> None:
        self._rewards, self._pool, self._timeout = tuple(rewards), pool, timeout

    def score(self, episodes: Sequence[Episode]) -> list[Scored]:
        """Measure every episode, all side by side, and close their environments."""
        try:
            contexts = [_context(episode) for episode in episodes]
            verdicts = [self._round(reward, episodes, contexts) for reward in self._rewards]
        finally:
            self._close([episode.worker for episode in episodes if episode.worker])
        return [
            self._scored(episode, list(outcomes))
            for episode, outcomes in zip(episodes, zip(*verdicts, strict=True), strict=True)
        ]

    def _round(
        self,
        reward: RewardSpec,
        episodes: Sequence[Episode],
        contexts: Sequence[MeasureContext],
    ) -> list[Outcome]:
        """One measure on all episodes: an environment takes one call after the other."""
        if not isinstance(reward.measure, str):
            return [_builtin(reward.measure, context) for context in contexts]
        calls = [
            (episode.worker, {"call": "measure", "name": reward.measure, "context": content})
            for episode, content in zip(episodes, map(_crossing, contexts), strict=True)
        ]
        outcomes = self._pool.run(calls, self._timeout)
        again = [
            at
            for at, outcome in enumerate(outcomes)
            if outcome.failure in _MAY_PASS_NEXT_TIME and not episodes[at].worker
        ]
        repeated = self._pool.run([calls[at] for at in again], self._timeout)
        for at, outcome in zip(again, repeated, strict=True):
            outcomes[at] = outcome
        return outcomes

    def _close(self, workers: list[Worker]) -> None:
        self._pool.run([(worker, {"call": "close"}) for worker in workers], self._timeout)
        for worker in workers:
            worker.kill()

    def _scored(self, episode: Episode, outcomes: list[Outcome]) -> Scored:
        verdicts = tuple(
            MeasureVerdict(
                measure=reward.name,
                value=None if outcome.failure else outcome.value["value"],
                reason=outcome.message if outcome.failure else outcome.value["reason"],
            )
            for reward, outcome in zip(self._rewards, outcomes, strict=True)
        )
        values = [verdict.value for verdict in verdicts]
        known = [value for value in values if value is not None]
        if len(known) < len(values) or episode.lost is not None:
            return Scored(episode, verdicts, None, passed=False)
        total = sum(r.weight * v for r, v in zip(self._rewards, known, strict=True))
        # A penalty (negative weight) has no part in whether the case was solved.
        passed = all(
            value == 1.0 for r, value in zip(self._rewards, known, strict=True) if r.weight > 0
        )
        return Scored(episode, verdicts, total, passed)


_MAY_PASS_NEXT_TIME = (Failure.CRASHED, Failure.TIMED_OUT)


def _builtin(spec: BuiltinMeasure, context: MeasureContext) -> Outcome:
    try:
        return Outcome(value=asdict(evaluate(spec, context)))
    except MissingExpectation as error:
        return Outcome(failure=Failure.RAISED, message=str(error))


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


def _crossing(context: MeasureContext) -> dict[str, Any]:
    """The context as it crosses the pipe; the environment is on the other side."""
    content = asdict(context)
    del content["environment"]
    return {**content, "final": context.final.text}


def group_rewards(rewards: Sequence[float | None], size: int) -> list[float | None]:
    """Drop whole groups in which any reward is missing.

    Args:
        rewards: Group after group, `size` each.
        size: Rollouts in a group.
    """
    groups = [rewards[at : at + size] for at in range(0, len(rewards), size)]
    return [None if None in group else reward for group in groups for reward in group]
