"""Runs a job's rewards on finished rollouts, all side by side."""

import json
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any

from dressage.authoring.measure import MeasureContext
from dressage.measuring.judge import Judge
from dressage.sandbox.pool import TIME_IS_OVER, WorkerPool
from dressage.sandbox.process import Failure, Outcome, Worker
from dressage.seeds import derived_seed
from dressage.spec.measure import LlmJudge, RewardSpec

JUDGE_THREADS = 8
TRL_KEYWORDS = (
    *("prompts", "completions", "completion_ids", "trainer_state", "environments"),
    *("log_metric", "log_extra"),
)
NOT_APPLICABLE = "does not apply to this rollout"  # None of a reward function, as in TRL
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
        seed: Of what the suite's code draws.

    Attributes:
        logged: What reward functions have logged, by metric; whoever reads it empties it.
    """

    def __init__(
        self,
        rewards: Sequence[RewardSpec],
        pool: WorkerPool,
        *,
        timeout: float,
        judge_key: str | None = None,
        until: float | None = None,
        seed: int = 0,
    ) -> None:
        self._until, self._seed = until, seed
        self.logged: dict[str, list[float]] = defaultdict(list)
        self._rewards, self._pool, self._timeout = tuple(rewards), pool, timeout
        self._judges = {
            at: Judge(reward.measure, api_key=judge_key)
            for at, reward in enumerate(self._rewards)
            if isinstance(reward.measure, LlmJudge)
        }

    def run(
        self,
        contexts: Sequence[MeasureContext],
        workers: Sequence[Worker | None],
        *,
        completion_ids: Sequence[list[int]] | None = None,
        state: dict[str, Any] | None = None,
    ) -> list[list[Outcome]]:
        """Outcomes by rollout, each in the order of the rewards.

        Args:
            contexts: What the measures may look at, one for each rollout.
            workers: The process of each rollout's environment, or None.
            completion_ids: Tokens of each rollout, for reward functions.
            state: TRL's `trainer_state`, for reward functions: `global_step` and others.
        """
        more: dict[str, Any] = {"trainer_state": state or {}}
        if completion_ids is not None:
            more["completion_ids"] = list(completion_ids)
        rounds = [self._round(at, contexts, workers, more) for at in range(len(self._rewards))]
        return [list(outcomes) for outcomes in zip(*rounds, strict=True)]

    def close(self) -> None:
        """Give the judges' connections back."""
        for judge in self._judges.values():
            judge.close()

    def _round(
        self,
        at: int,
        contexts: Sequence[MeasureContext],
        workers: Sequence[Worker | None],
        more: dict[str, Any],
    ) -> list[Outcome]:
        """One reward on all rollouts: an environment takes one call after the other."""
        reward = self._rewards[at]
        if at in self._judges:
            with ThreadPoolExecutor(JUDGE_THREADS, thread_name_prefix="judge") as threads:
                return list(threads.map(partial(self._judged, at), contexts))
        if reward.function is not None:
            return self._function(reward.function, contexts, workers, more)
        if isinstance(reward.measure, str):
            name = reward.measure
            requests = [
                {
                    "call": "measure",
                    "name": name,
                    "context": _crossing(c),
                    "seed": self._seed_of(name, c),
                }
                for c in contexts
            ]
            return self._in_sandbox(requests, workers)
        assert reward.measure
        call = {"call": "builtin", "measure": reward.measure.model_dump(mode="json", by_alias=True)}
        apart: list[Worker | None] = [None] * len(contexts)
        return self._in_sandbox([{**call, "context": _crossing(c)} for c in contexts], apart)

    def _judged(self, at: int, context: MeasureContext) -> Outcome:
        if self._until is not None and time.monotonic() > self._until:
            return TIME_IS_OVER
        return self._judges[at].verdict(context)

    def _in_sandbox(
        self,
        requests: Sequence[dict[str, Any]],
        workers: Sequence[Worker | None],
        *,
        rollouts: int = 1,
    ) -> list[Outcome]:
        calls = list(zip(workers, requests, strict=True))
        timeout = self._timeout * rollouts
        outcomes = self._pool.run(calls, timeout, until=self._until)
        again = [
            at
            for at, outcome in enumerate(outcomes)
            if outcome.failure in MAY_PASS_NEXT_TIME and not workers[at]
        ]
        repeated = self._pool.run([calls[at] for at in again], timeout, until=self._until)
        for at, outcome in zip(again, repeated, strict=True):
            outcomes[at] = outcome
        return outcomes

    def _function(
        self,
        name: str,
        contexts: Sequence[MeasureContext],
        workers: Sequence[Worker | None],
        more: dict[str, Any],
    ) -> list[Outcome]:
        """A reward function sees all rollouts at once, as TRL's do, and has time for each."""
        request = {
            "call": "reward_function",
            "name": name,
            "prompts": [c.messages[: c.prompt_length] for c in contexts],
            "completions": [c.messages[c.prompt_length :] for c in contexts],
            "columns": _columns(contexts),
            "seed": self._seed_of(name, contexts[0]),
            **more,
        }
        if any(workers):
            request["environments"] = self._snapshots(workers)
        (outcome,) = self._in_sandbox([request], [None], rollouts=len(contexts))
        if outcome.failure:
            return [outcome] * len(contexts)
        for metric, value in outcome.value["metrics"].items():
            self.logged[metric].append(value)
        return [
            Outcome(value={"value": value, "reason": NOT_APPLICABLE if value is None else ""})
            for value in outcome.value["rewards"]
        ]

    def _snapshots(self, workers: Sequence[Worker | None]) -> list[dict[str, str] | None]:
        """The environments as they are now, as the sandbox gives and takes them, or why not."""
        there = [worker for worker in workers if worker]
        calls: list[tuple[Worker | None, dict[str, Any]]] = [
            (worker, {"call": "snapshot"}) for worker in there
        ]
        found = iter(self._pool.run(calls, self._timeout, until=self._until))
        told = [
            {"error": outcome.message} if outcome.failure else {"content": outcome.value}
            for outcome in found
        ]
        given = iter(told)
        return [next(given) if worker else None for worker in workers]

    def _seed_of(self, name: str, context: MeasureContext) -> int:
        """The same for all rollouts of a case."""
        case = json.dumps([context.input, context.expect], sort_keys=True, default=str)
        return derived_seed(self._seed, name, case)


def _crossing(context: MeasureContext) -> dict[str, Any]:
    """The context as it crosses the pipe; the environment is on the other side."""
    content = asdict(context)
    del content["environment"]
    return {**content, "final": context.final.text}


def _columns(contexts: Sequence[MeasureContext]) -> dict[str, list[Any]]:
    """What cases carry besides their input, as TRL passes dataset columns."""
    rows = [{**context.metadata, **context.expect, **context.extra} for context in contexts]
    names = sorted({name for row in rows for name in row} - set(TRL_KEYWORDS))
    return {name: [row.get(name) for row in rows] for name in names}
