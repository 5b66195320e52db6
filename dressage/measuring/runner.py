"""Runs a job's rewards on finished rollouts, all side by side."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any

from dressage.authoring.measure import MeasureContext
from dressage.measuring.judge import Judge
from dressage.sandbox.pool import TIME_IS_OVER, WorkerPool
from dressage.sandbox.process import Failure, Outcome, Worker
from dressage.spec.chat import Message
from dressage.spec.measure import LlmJudge, RewardSpec

JUDGE_THREADS = 8
MAY_PASS_NEXT_TIME = (Failure.CRASHED, Failure.TIMED_OUT)


class MeasureRunner:
    """Gives an outcome for each reward on each rollout.

    Args:
        rewards: The job's rewards.
        pool: Where the suite's measures run, and built-in ones like them: what users write into a
            pattern or a schema may take for ever, too.
        timeout: Seconds for one call of a measure.
        judge_key: The bearer token for judges.
        until: A time of `time.monotonic()` after which nothing more is measured.
    """

    def __init__(
        self,
        rewards: Sequence[RewardSpec],
        pool: WorkerPool,
        *,
        timeout: float,
        judge_key: str | None = None,
        until: float | None = None,
    ) -> None:
        self._until = until
        self._rewards, self._pool, self._timeout = tuple(rewards), pool, timeout
        self._judges = {
            at: Judge(reward.measure, api_key=judge_key)
            for at, reward in enumerate(self._rewards)
            if isinstance(reward.measure, LlmJudge)
        }

    def run(
        self, contexts: Sequence[MeasureContext], workers: Sequence[Worker | None]
    ) -> list[list[Outcome]]:
        """Outcomes by rollout, each in the order of the rewards.

        Args:
            contexts: What the measures may look at, one for each rollout.
            workers: The process of each rollout's environment, or None.
        """
        rounds = [self._round(at, contexts, workers) for at in range(len(self._rewards))]
        return [list(outcomes) for outcomes in zip(*rounds, strict=True)]

    def close(self) -> None:
        """Give the judges' connections back."""
        for judge in self._judges.values():
            judge.close()

    def _round(
        self, at: int, contexts: Sequence[MeasureContext], workers: Sequence[Worker | None]
    ) -> list[Outcome]:
        """One reward on all rollouts: an environment takes one call after the other."""
        reward = self._rewards[at]
        if at in self._judges:
            with ThreadPoolExecutor(JUDGE_THREADS, thread_name_prefix="judge") as threads:
                return list(threads.map(partial(self._judged, at), contexts))
        if reward.function is not None:
            return self._function(reward.function, contexts)
        if isinstance(reward.measure, str):
            call: dict[str, Any] = {"call": "measure", "name": reward.measure}
            return self._in_sandbox([{**call, "context": _crossing(c)} for c in contexts], workers)
        assert reward.measure
        call = {"call": "builtin", "measure": reward.measure.model_dump(mode="json", by_alias=True)}
        apart: list[Worker | None] = [None] * len(contexts)
        return self._in_sandbox([{**call, "context": _crossing(c)} for c in contexts], apart)

    def _judged(self, at: int, context: MeasureContext) -> Outcome:
        if self._until is not None and time.monotonic() > self._until:
            return TIME_IS_OVER
        return self._judges[at].verdict(context)

    def _in_sandbox(
        self, requests: Sequence[dict[str, Any]], workers: Sequence[Worker | None]
    ) -> list[Outcome]:
        calls = list(zip(workers, requests, strict=True))
        outcomes = self._pool.run(calls, self._timeout, until=self._until)
        again = [
            at
            for at, outcome in enumerate(outcomes)
            if outcome.failure in MAY_PASS_NEXT_TIME and not workers[at]
        ]
        repeated = self._pool.run([calls[at] for at in again], self._timeout, until=self._until)
        for at, outcome in zip(again, repeated, strict=True):
            outcomes[at] = outcome
        return outcomes

    def _function(self, name: str, contexts: Sequence[MeasureContext]) -> list[Outcome]:
        """A reward function sees all rollouts at once, as TRL's do."""
        request = {
            "call": "reward_function",
            "name": name,
            "prompts": [_until_answer(context.messages) for context in contexts],
            "completions": [
                context.messages[len(_until_answer(context.messages)) :] for context in contexts
            ],
            "columns": _columns(contexts),
        }
        (outcome,) = self._in_sandbox([request], [None])
        if outcome.failure:
            return [outcome] * len(contexts)
        return [
            Outcome(failure=Failure.RAISED, message=f"{name} returned None for this rollout")
            if value is None
            else Outcome(value={"value": value, "reason": ""})
            for value in outcome.value
        ]


def _crossing(context: MeasureContext) -> dict[str, Any]:
    """The context as it crosses the pipe; the environment is on the other side."""
    content = asdict(context)
    del content["environment"]
    return {**content, "final": context.final.text}


def _until_answer(messages: list[Message]) -> list[Message]:
    """The prompt: everything before the agent's first own turn after the last user message."""
    users = [at for at, message in enumerate(messages) if message["role"] == "user"]
    return messages[: users[-1] + 1] if users else []


def _columns(contexts: Sequence[MeasureContext]) -> dict[str, list[Any]]:
    """What cases carry besides their input, as TRL passes dataset columns."""
    rows = [{**context.metadata, **context.expect} for context in contexts]
    names = sorted({name for row in rows for name in row} - {"prompts", "completions"})
    return {name: [row.get(name) for row in rows] for name in names}
